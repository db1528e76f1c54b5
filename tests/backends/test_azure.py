from __future__ import annotations

import socket
import sys

import pytest

from neuron_store.errors import ConfigError, MissingExtra, TierError
from neuron_store.tier_url import parse_tier_url
from neuron_store_backends._options import Times
from neuron_store_backends.azure import AzureStore
from tests.backends.cases import ConditionalCases
from tests.backends.fault_cases import FaultCases
from tests.servers.azurite import KEY, connection_string
from tests.servers.processes import black_hole

pytest.importorskip("adlfs")


class TestAzurite(ConditionalCases):
    @pytest.fixture
    def place(self, azure_place):
        return azure_place


def _says(status, code):
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>x</Message></Error>'
    headers = {"x-ms-error-code": code, "Content-Type": "application/xml"}
    return {"status": status, "headers": headers, "body": body.encode()}


@pytest.mark.slow
class TestAzuriteFaults(FaultCases):
    where = {
        "look": {"method": "GET", "path": "/index/k.json"},
        "probe": {"method": "PUT", "path": "/probe/"},
        "list": {"method": "GET", "path": "comp=list"},
        "upload": {"method": "PUT", "path": "/payload/"},
        "commit": {"method": "PUT", "path": "/index/k.json"},
        "fetch": {"method": "GET", "path": "/graph_k.neff"},
        "part": {"method": "PUT", "path": "comp=block&"},
        "finish": {"method": "PUT", "path": "comp=blocklist"},
    }
    says = {
        "throttled": _says("503 Server Busy", "ServerBusy"),
        "too many": _says("429 Too Many Requests", "TooManyRequests"),
        "stumble": _says("500 Oops", "InternalError"),
        "conflict": _says("409 Conflict", "PendingCopyOperation"),
        "denied": _says("403 Forbidden", "AuthorizationPermissionMismatch"),
        "expired": _says("401 Unauthorized", "InvalidAuthenticationInfo"),
    }
    # The conditions are signed, so they cannot be taken out on the way.
    ignore_create = {"action": "claim", "method": "PUT", "path": "/probe/"}
    ignore_replace = {"action": "claim", "method": "PUT", "path": "/probe/", "skip": 3}
    denied = "Storage Blob Data Contributor"

    @pytest.fixture
    def place(self, azure_behind_faults):
        return azure_behind_faults[0]

    @pytest.fixture
    def faults(self, azure_behind_faults):
        return azure_behind_faults[1]


def test_no_account_and_no_credentials_are_told_with_the_remedy(monkeypatch):
    for name in ("CONNECTION_STRING", "ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    with pytest.raises(TierError, match="az login"):
        AzureStore("container/prefix", anon=True).find("k")


def test_credentials_that_are_set_and_wrong_are_called_so(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=abc")
    with pytest.raises(TierError, match="AZURE_STORAGE_CONNECTION_STRING is set and") as caught:
        AzureStore("container/prefix").find("k")
    assert "abc" not in str(caught.value)


def test_nobody_listening_is_an_error_soon(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(url))
        with pytest.raises(TierError, match="cannot connect|refused"):
            AzureStore("container/prefix").find("k")


def test_an_account_that_does_not_resolve_is_an_error(monkeypatch):
    url = "http://no-such-account.invalid:1"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(url))
    with pytest.raises(TierError, match="resolve|cannot connect") as caught:
        AzureStore("container/prefix").find("k")
    assert KEY not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_dropped_packets_end_in_a_few_connect_timeouts(monkeypatch):
    with black_hole() as url:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(url))
        with pytest.raises(TierError, match="no connection in time"):
            AzureStore("container/p", times=Times(connect_timeout=0.5)).find("k")


def test_the_account_may_stand_in_an_abfs_url():
    url = parse_tier_url("abfs://box@account.dfs.core.windows.net/a/b?timeout=9&name=az")
    store = AzureStore.from_url(url)
    assert store.objects.root == "box/a/b"
    assert store.objects.options["account_name"] == "account"
    assert store.location == "abfs://box@account.dfs.core.windows.net/a/b"
    assert store.name == "az"


@pytest.mark.parametrize(
    "url", ["az://", "az://box/../x", "az://box//x", "az://box?unknown=1", "az://box?timeout=x"]
)
def test_an_unusable_url_is_refused(url):
    with pytest.raises(ConfigError):
        AzureStore.from_url(parse_tier_url(url))


def test_without_the_extra_the_error_has_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(MissingExtra, match=r"neuron-store\[azure\]"):
        AzureStore("box/p")


def test_an_answer_that_makes_no_sense_is_not_blamed_on_the_credentials(azure_place):
    told = azure_place.store().objects.classify(ValueError("not XML"))
    assert told.reason.startswith("the answer is none of an object store's")
