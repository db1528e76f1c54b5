"""The posix tier on real NFS, between two mounts with caches of their own."""

import sys
from pathlib import Path

import pytest

from tests.servers.nfs import CannotRun, run_on_nfs

CONTRACT = Path(__file__).with_name("nfs_contract.py")


@pytest.mark.slow
@pytest.mark.nfs
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("version", ["4.1", "3"])
def test_the_contract_holds_between_two_mounts(version):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
    command += ["--basetemp=/run/pytest", str(CONTRACT)]
    try:
        ended = run_on_nfs(command, version=version, timeout=1400)
    except CannotRun as error:
        pytest.skip(str(error))
    print(ended.output[-2000:])
    assert ended.status == 0, ended.output[-6000:]
