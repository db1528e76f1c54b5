from __future__ import annotations

import pytest

from neuron_store import steps

# The shared cases are no test module, so their asserts are rewritten on request.
pytest.register_assert_rewrite(
    "tests.backends.cases", "tests.backends.compressing_cases", "tests.backends.fault_cases"
)


@pytest.fixture(autouse=True)
def no_hook():
    yield
    steps.set_hook(None)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.fixture
def artifact(source):
    """Not published yet; its files are in `source`."""
    from tests.backends.cases import CONTENTS, fill

    return fill(source, CONTENTS, "k")


@pytest.fixture
def into(tmp_path):
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


@pytest.fixture
def other(tmp_path):
    (tmp_path / "other").mkdir()
    return tmp_path / "other"


@pytest.fixture(scope="session")
def moto():
    from tests.servers.moto import MotoServer

    with MotoServer() as server:
        yield server


@pytest.fixture
def aws(monkeypatch, tmp_path):
    """Credentials from the environment, and nothing from this machine's own settings."""
    from tests.servers.moto import CREDENTIALS

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def s3_place(moto, aws):
    from tests.backends.places import S3Place

    moto.faults.clear()
    yield S3Place(moto.client(), moto.url)
    moto.faults.clear()


def _server(manager, tmp_path_factory, name):
    from tests.servers.processes import Unavailable

    try:
        with manager(tmp_path_factory.mktemp(name)) as url:
            yield url
    except Unavailable as error:
        pytest.skip(f"{name}: {error}")


@pytest.fixture(scope="session")
def azurite_url(tmp_path_factory):
    from tests.servers.azurite import azurite

    yield from _server(azurite, tmp_path_factory, "azurite")


@pytest.fixture(scope="session")
def gcs_url(tmp_path_factory):
    from tests.servers.gcs import fake_gcs

    yield from _server(fake_gcs, tmp_path_factory, "fake-gcs-server")


@pytest.fixture(scope="session")
def seaweed_url(tmp_path_factory):
    from tests.servers.seaweed import seaweed

    yield from _server(seaweed, tmp_path_factory, "seaweedfs")


@pytest.fixture(scope="session")
def rclone_url(tmp_path_factory):
    from tests.servers.seaweed import rclone

    yield from _server(rclone, tmp_path_factory, "rclone")


@pytest.fixture
def azure_place(azurite_url, monkeypatch):
    from tests.backends.places import AzurePlace
    from tests.servers.azurite import connection_string

    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(azurite_url))
    return AzurePlace(azurite_url)


@pytest.fixture
def gcs_place(gcs_url, monkeypatch):
    from tests.backends.places import GcsPlace

    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    return GcsPlace(gcs_url)


@pytest.fixture
def azure_behind_faults(azurite_url, azure_place, monkeypatch):
    """The place, its tier reaching it through the proxy; and the proxy's rules."""
    from tests.servers.azurite import connection_string
    from tests.servers.faults import FaultProxy

    with FaultProxy(azurite_url) as proxy:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(proxy.url))
        yield azure_place, proxy.faults


@pytest.fixture
def gcs_behind_faults(gcs_url, gcs_place):
    from tests.servers.faults import FaultProxy

    with FaultProxy(gcs_url) as proxy:
        gcs_place.endpoint = proxy.url
        yield gcs_place, proxy.faults
