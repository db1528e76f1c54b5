from __future__ import annotations

import json
import socket
import sys

import pytest

from neuron_store.errors import ConfigError, MissingExtra, TierError
from neuron_store.tier_url import parse_tier_url
from neuron_store_backends._options import Times
from neuron_store_backends.gcs import GCSStore
from tests.backends.cases import ConditionalCases, fill
from tests.backends.fault_cases import FaultCases
from tests.servers.processes import black_hole

pytest.importorskip("gcsfs")


class TestFakeGcs(ConditionalCases):
    @pytest.fixture
    def place(self, gcs_place):
        return gcs_place


def _says(status, reason):
    error = {"code": int(status[:3]), "message": "x", "errors": [{"reason": reason}]}
    body = json.dumps({"error": error}, separators=(",", ":")).encode()
    return {"status": status, "headers": {"Content-Type": "application/json"}, "body": body}


@pytest.mark.slow
class TestFakeGcsFaults(FaultCases):
    where = {
        "look": {"method": "GET", "path": "index%2Fk.json"},
        # A create names its object in the body.
        "probe": {"method": "POST", "path": "ifGenerationMatch=0"},
        "list": {"method": "GET", "path": "payload/k/&"},
        "upload": {"method": "POST", "path": "/o?uploadType=multipart"},
        "commit": {"method": "POST", "path": "ifGenerationMatch=0", "skip": 2},
        "fetch": {"method": "GET", "path": "graph_k.neff"},
        "part": {"method": "PUT", "path": "upload"},
        "finish": {"method": "PUT", "path": "upload", "skip": 2},
    }
    says = {
        "throttled": _says("503 Unavailable", "backendError"),
        "too many": _says("429 Too Many Requests", "rateLimitExceeded"),
        "stumble": _says("500 Oops", "backendError"),
        "conflict": _says("409 Conflict", "conflict"),
        "denied": _says("403 Forbidden", "forbidden"),
        "expired": _says("401 Unauthorized", "authError"),
    }
    ignore_create = {"action": "strip", "parameter": "ifGenerationMatch"}
    # All creates before it keep theirs.
    ignore_replace = {"action": "claim", "method": "POST", "skip": 3}
    denied = "Storage Object User"

    @pytest.fixture
    def place(self, gcs_behind_faults):
        return gcs_behind_faults[0]

    @pytest.fixture
    def faults(self, gcs_behind_faults):
        return gcs_behind_faults[1]

    def test_a_403_that_means_slow_down_is_tried_again(self, place, faults):
        rule = faults.add("answer", **_says("403 Forbidden", "userRateLimitExceeded"))
        assert place.store().find("k") is None
        assert rule.times == 0


def test_a_payload_that_holds_gcsfs_own_boundary_survives(gcs_place, tmp_path):
    (tmp_path / "into").mkdir()
    (tmp_path / "source").mkdir()
    data = b"\n--==0==--\r\n" * 1000
    artifact = fill(tmp_path / "source", {"f": data}, "k")
    gcs_place.store().publish(artifact, tmp_path / "source")
    gcs_place.store().fetch("k", tmp_path / "into")
    assert (tmp_path / "into" / "f").read_bytes() == data


def test_a_miss_costs_one_request_once_the_bucket_was_seen(gcs_behind_faults):
    place, faults = gcs_behind_faults
    store = place.store()
    assert store.find("nothing") is None
    faults.log.clear()
    assert store.find("nothing") is None
    assert len(faults.log) == 1


def test_missing_credentials_are_an_error_with_the_remedy(gcs_place, monkeypatch, tmp_path):
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(TierError, match="gcloud auth"):
        gcs_place.store(anon=False).find("k")


@pytest.mark.parametrize(
    ("content", "told"), [(None, "does not exist"), ("{}", "is no credentials file")]
)
def test_credentials_that_are_set_and_wrong_are_called_so(
    gcs_place, monkeypatch, tmp_path, content, told
):
    path = tmp_path / "key.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with pytest.raises(TierError, match=f"GOOGLE_APPLICATION_CREDENTIALS=.*{told}"):
        gcs_place.store(anon=False).find("k")


def test_nobody_listening_is_an_error_soon():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TierError, match="cannot connect|refused"):
            GCSStore("bucket/p", endpoint_url=url, anon=True).find("k")


def test_dropped_packets_end_in_a_few_connect_timeouts():
    times = Times(connect_timeout=0.5)
    with black_hole() as url, pytest.raises(TierError, match="no connection in time"):
        GCSStore("bucket/p", endpoint_url=url, anon=True, times=times).find("k")


@pytest.mark.parametrize(
    "url", ["gs://", "gs://b/../x", "gs://b//x", "gs://b?unknown=1", "gs://b?endpoint_url=x"]
)
def test_an_unusable_url_is_refused(url):
    with pytest.raises(ConfigError):
        GCSStore.from_url(parse_tier_url(url))


def test_without_the_extra_the_error_has_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtra, match=r"neuron-store\[gcs\]"):
        GCSStore("bucket/p")
