from __future__ import annotations

import pytest

from neuron_store import steps

# The shared cases are no test module, so their asserts are rewritten on request.
pytest.register_assert_rewrite("tests.backends.cases")


@pytest.fixture(autouse=True)
def no_hook():
    yield
    steps.set_hook(None)


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
