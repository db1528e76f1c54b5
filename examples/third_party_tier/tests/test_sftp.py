"""The contract that every tier must keep, and what differs, against a real SFTP server."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from neuron_store import ConfigError, Publication, TierError
from neuron_store.registry import known_schemes, open_tier
from neuron_store.testing import (
    DELETE,
    FETCH,
    PUBLISH,
    ArtifactStoreContract,
    inject_steps,
    make_source,
)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The tiers' root at the server, and the URL's options."""
    folder = tmp_path_factory.mktemp("sftp")
    command = [sys.executable, str(Path(__file__).with_name("serve.py")), str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 30
        while not (folder / "ready").exists():
            assert process.poll() is None, "the server did not start"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        port = (folder / "ready").read_text()
        options = f"username=me&identity={folder}/client&known_hosts={folder}/known_hosts"
        yield folder / "files", f"sftp://127.0.0.1:{port}{folder}/files", options
    finally:
        process.stdin.close()
        process.wait(10)


@pytest.fixture
def url(server):
    _, base, options = server
    return f"{base}/{uuid.uuid4().hex}?{options}"


class TestContract(ArtifactStoreContract):
    rounds = 30

    @pytest.fixture
    def factory(self, url):
        return functools.partial(open_tier, url)


def test_the_scheme_is_found_by_its_entry_point():
    assert "sftp" in known_schemes()


# Each point opens several connections, at a tenth of a second each.
@pytest.mark.parametrize(
    ("operation", "how"),
    [(PUBLISH, "kill"), (DELETE, "raise"), (FETCH, "interrupt")],
    ids=str,
)
def test_a_fault_at_any_step_breaks_no_promise(operation, how, server, tmp_path):
    _, base, options = server
    place = uuid.uuid4().hex

    def open_at(root):
        return open_tier(f"{base}/{place}{root.parent.name}?{options}")

    report = inject_steps(operation, open_at, tmp_path, how=[how])
    print(report)
    assert report.points >= 2
    assert not report.failures


def test_a_damaged_record_is_left_and_the_remedy_told(server, tmp_path):
    root, base, options = server
    place = uuid.uuid4().hex
    with open_tier(f"{base}/{place}?{options}") as store:
        artifact, source = make_source(tmp_path / "source", "k", {"f": b"bytes"})
        assert store.publish(artifact, source) is Publication.CREATED
        (root / place / "index" / "k.json").write_bytes(b"torn")
        with pytest.raises(TierError, match="delete the entry, and promote it again"):
            store.publish(artifact, source)
        assert store.delete("k")
        assert store.publish(artifact, source) is Publication.CREATED


@pytest.mark.parametrize("url", ["sftp://host", "sftp://host:x/path", "sftp://host/path?unknown=1"])
def test_an_unusable_url_is_refused(url):
    with pytest.raises(ConfigError):
        open_tier(url)


def test_a_server_that_is_not_known_is_refused(server, tmp_path):
    _, base, options = server
    (tmp_path / "none").write_text("")
    options = options.replace(options.rpartition("known_hosts=")[2], str(tmp_path / "none"))
    with open_tier(f"{base}/x?{options}") as store, pytest.raises(TierError, match="known_hosts"):
        store.find("k")
