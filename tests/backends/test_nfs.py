"""The posix tier on real NFS, between two mounts with caches of their own."""

import sys
from pathlib import Path

import pytest

from tests.servers.nfs import CannotRun, run_on_nfs

CONTRACT = Path(__file__).with_name("nfs_contract.py")
LEASES = Path(__file__).with_name("nfs_leases.py")


@pytest.mark.slow
@pytest.mark.nfs
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("version", ["4.1"])
def test_the_contract_holds_between_two_mounts(version):
    run(CONTRACT, version)


@pytest.mark.slow
@pytest.mark.nfs
@pytest.mark.timeout(1500)
def test_leases_exclude_between_two_mounts_where_flock_does_not():
    run(LEASES, "3")


def run(contract, version):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
    command += ["--basetemp=/run/pytest", str(contract)]
    try:
        ended = run_on_nfs(command, version=version, timeout=1400)
    except CannotRun as error:
        pytest.skip(str(error))
    print(ended.output[-2000:])
    assert ended.status == 0, ended.output[-6000:]
