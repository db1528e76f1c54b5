"""The posix tier on real NFS, 4.1 and 3, between two mounts with caches of their own.

One guest at a time: each has a gibibyte of memory.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.servers.nfs import CannotRun, run_on_nfs

HERE = Path(__file__).parent
VERSIONS = ("4.1", "3")
pytestmark = [pytest.mark.slow, pytest.mark.nfs, pytest.mark.timeout(1500)]


def run(command, version, timeout=1400):
    try:
        ended = run_on_nfs(command, version=version, timeout=timeout)
    except CannotRun as error:
        pytest.skip(str(error))
    print(ended.output[-3000:])
    assert ended.status == 0, ended.output[-6000:]
    return ended.output


@pytest.mark.parametrize("version", VERSIONS)
def test_the_contract_holds_between_two_mounts(version):
    """Pitfalls 28 and 30: races, kills and readers, spread over both mounts."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
    run([*command, "--basetemp=/run/pytest", str(HERE / "nfs_contract.py")], version)


def test_leases_exclude_between_two_mounts_where_flock_does_not():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
    run([*command, "--basetemp=/run/pytest", str(HERE / "nfs_leases.py")], "3")


@pytest.mark.parametrize("version", VERSIONS)
def test_nfs_is_as_the_documentation_says(version):
    """What docs/posix-tier.md tells users of NFS, and what the tier's code rests on.

    Pitfalls 28, 29, 30: hidden names, locks that do not exclude, stale handles.
    """
    told = run([sys.executable, str(HERE / "nfs_facts.py")], version)
    facts = json.loads(told.splitlines()[-1])
    looks = facts["negative_lookup"]
    assert looks["listed_at_once"]
    assert looks["seen_after_listing"]
    assert looks["hidden_seconds"] < 40, "the tier waits 40 s for a winner to become visible"
    assert looks["rename_onto_hidden"] in {"ENOTEMPTY", "EEXIST"}
    assert facts["stale"] in {"ESTALE", "EIO", "read to its end"}
    assert facts["silly_names"]["names_while_open"] == [".nfs"]
    assert facts["silly_names"]["rmdir_while_open"] in {"ENOTEMPTY", "EBUSY"}
    assert facts["silly_names"]["names_after_close"] == []
    assert facts["flock"]["two mounts"] is (version == "4.1")
    assert facts["noreplace"] == "EINVAL"
    assert {facts["exclusive"][n] for n in ("create", "link", "mkdir")} == {"EEXIST"}
    assert facts["exclusive"]["fsync_directory"] == "ok"
