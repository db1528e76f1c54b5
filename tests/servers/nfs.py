"""A real Linux NFS server and two mounts of it, for one command.

The host's kernel needs no NFS: server and clients run in a User-Mode Linux guest that sees the
host's root directory, so this Python and this checkout work inside as they are. The two mounts have
caches of their own, as two nodes would. The guest writes to the host's files: let the command write
below `$NFS1`, `$NFS2` and its own scratch directory only.

The packages (Debian's, about 45 MB) are fetched once and kept in the user's cache directory.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import attrs

PACKAGES = (
    "user-mode-linux",
    "nfs-kernel-server",
    "nfs-common",
    "rpcbind",
    "kmod",
    "libkmod2",
    "busybox-static",
)
# Libraries of theirs that a small image lacks; names differ between Debian's releases.
LIBRARIES = (
    "libwrap0",
    "libnsl2",
    "libtirpc3",
    "libtirpc3t64",
    "libnfsidmap1",
    "libevent-core-2.1-7",
    "libevent-core-2.1-7t64",
)
# Guest's mount options for each protocol: short attribute caches for files, the usual 30 s for
# directories on 4.1, and no lock daemon on 3, so that flock does not exclude between the mounts.
OPTIONS = {
    "4.1": ("mount.nfs4", "/", "vers=4.1,nosharecache,acregmin=3,acdirmin=30"),
    "3": (
        "mount.nfs",
        "/mnt/srv",
        "vers=3,nolock,actimeo=3,nosharecache,mountport=20048,mountproto=tcp,port=2049",
    ),
}


class CannotRun(Exception):
    """The guest cannot be had on this machine; says why."""


@attrs.frozen
class Ended:
    """How the command ended."""

    status: int
    output: str


def cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root, "neuron_store_tests", "nfs")


def guest_root() -> Path:
    """The unpacked packages, fetched at first use."""
    if platform.machine() != "x86_64" or not shutil.which("apt-get") or os.getuid() != 0:
        raise CannotRun("the NFS guest needs root on a Debian-like x86_64 machine")
    root = cache_directory() / "root"
    if (root / "usr/bin/linux.uml").exists():
        return root
    cache_directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_directory()) as folder:
        debs, new = Path(folder, "debs"), Path(folder, "root")
        debs.mkdir()
        subprocess.run(["apt-get", "-qq", "update"], capture_output=True, check=False)
        fetched = _download(debs, *PACKAGES)
        if fetched.returncode:
            raise CannotRun(f"its packages cannot be had: {fetched.stderr.strip()[-300:]}")
        for name in LIBRARIES:
            _download(debs, name)
        new.mkdir()
        for deb in debs.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(deb), str(new)], check=True)
        (new / "kmod").mkdir()
        (new / "kmod/modprobe").symlink_to("../bin/kmod")
        try:
            new.rename(root)
        except OSError:
            if not (root / "usr/bin/linux.uml").exists():
                raise
    return root


def _download(into: Path, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *names],
        cwd=into,
        capture_output=True,
        text=True,
        check=False,
    )


def _init_script(root: Path, run: Path, version: str) -> str:
    """PID 1 of the guest: server, two clients, the command, power off."""
    helper, export, options = OPTIONS[version]
    if version == "3":
        server = f"""
        {root}/usr/sbin/exportfs -o $X,fsid=1 127.0.0.1:/mnt/srv
        mkdir -p /run/rpcbind; cp /etc/passwd /run/passwd
        echo _rpc:x:65533:65534::/run/rpcbind:/bin/false >>/run/passwd
        mount --bind /run/passwd /etc/passwd
        {root}/sbin/rpcbind -f & sleep 1
        {root}/usr/sbin/rpc.nfsd -V 3 4
        {root}/usr/sbin/rpc.mountd -p 20048
        """
    else:
        server = f"""
        {root}/usr/sbin/exportfs -o $X,fsid=0 127.0.0.1:/mnt/srv
        {root}/usr/sbin/rpc.nfsd -N 3 -V 4.1 -V 4.2 4
        {root}/usr/sbin/rpc.mountd -N 3
        """
    return f"""#!/bin/bash
        export PATH=/usr/sbin:/usr/bin:/sbin:/bin:{root}/sbin:{root}/usr/sbin
        export LD_LIBRARY_PATH={root}/lib/x86_64-linux-gnu:{root}/usr/lib/x86_64-linux-gnu
        exec >{run}/guest 2>&1
        mount -t proc proc /proc; mount -t sysfs sys /sys
        mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /mnt
        mount -t devtmpfs devtmpfs /dev; mkdir -p /dev/shm; mount -t tmpfs tmpfs /dev/shm
        mount -t tmpfs tmpfs /var/lib/nfs || mount -t tmpfs tmpfs /var/lib
        mkdir -p /var/lib/nfs/v4recovery /var/lib/nfs/rpc_pipefs /var/lib/nfs/nfsdcld
        touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/xtab /var/lib/nfs/state
        mkdir -p /mnt/srv /mnt/c1 /mnt/c2
        {root}/bin/busybox ip link set lo up
        kernel=$(uname -r)
        mkdir -p /run/x/lib/modules/$kernel
        mount --bind {root}/usr/lib/uml/modules/$kernel /run/x/lib/modules/$kernel
        for module in nfsd nfs nfsv3 nfsv4; do {root}/kmod/modprobe -d /run/x $module; done
        mount -t nfsd nfsd /proc/fs/nfsd
        mount -t rpc_pipefs rpc /var/lib/nfs/rpc_pipefs
        mount -t tmpfs -o size=512m,mode=1777 tmpfs /mnt/srv
        echo 10 >/proc/fs/nfsd/nfsv4leasetime; echo 10 >/proc/fs/nfsd/nfsv4gracetime
        X=rw,no_root_squash,no_subtree_check,sync,insecure
        {server}
        echo Y >/proc/fs/nfsd/v4_end_grace; sleep 0.3
        status=97
        if {root}/sbin/{helper} 127.0.0.1:{export} /mnt/c1 -o {options} &&
           {root}/sbin/{helper} 127.0.0.1:{export} /mnt/c2 -o {options}; then
          ( unset LD_LIBRARY_PATH; . {run}/command ) >{run}/output 2>&1 </dev/null; status=$?
        fi
        echo $status >{run}/status; sync
        echo o >/proc/sysrq-trigger; {root}/bin/busybox poweroff -f
        """


def run_on_nfs(command: list[str], *, version: str = "4.1", timeout: float = 900) -> Ended:
    """Run `command` with `$NFS1` and `$NFS2` set to two mounts of one server.

    Raises:
        CannotRun: the guest does not start here.
        subprocess.TimeoutExpired: it took longer than `timeout` seconds; the guest was killed.
    """
    root = guest_root()
    with tempfile.TemporaryDirectory(prefix="neuron_store-nfs-") as folder:
        run = Path(folder)
        keep = {k: v for k, v in os.environ.items() if k in {"PATH", "HOME", "VIRTUAL_ENV"}}
        keep |= {"NFS1": "/mnt/c1", "NFS2": "/mnt/c2", "PYTHONDONTWRITEBYTECODE": "1"}
        lines = [f"cd {shlex.quote(os.getcwd())}"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in keep.items()]
        lines.append(shlex.join(command))
        (run / "command").write_text("\n".join(lines) + "\n")
        init = run / "init"
        init.write_text(_init_script(root, run, version))
        init.chmod(0o755)
        argv = [
            str(root / "usr/bin/linux.uml"),
            "mem=1G",
            "root=/dev/root",
            "rootfstype=hostfs",
            "rootflags=/",
            "rw",
            f"init={init}",
            "con=null",
            "con0=null,fd:1",
            "quiet",
            f"uml_dir={run}/",
            "umid=nfs",
        ]
        with open(run / "console", "wb") as console:
            guest = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
            try:
                guest.wait(timeout)
            finally:
                if guest.poll() is None:
                    os.killpg(guest.pid, 9)
                    guest.wait()
        output = _text(run / "output")
        status = _text(run / "status").strip()
        if status in {"", "97"}:
            console_text = _text(run / "console")
            if "put_fp_registers" in console_text:
                # Seen on processors with AMX: a trace of its stack would tell nobody that.
                raise CannotRun("the guest's kernel does not know all registers of this processor")
            told = _text(run / "guest")[-600:] or console_text[-600:]
            raise CannotRun(f"the guest did not mount NFS {version}: {told}")
        return Ended(int(status), output)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
