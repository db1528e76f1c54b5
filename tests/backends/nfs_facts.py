"""What a POSIX tier meets on NFS, measured between two mounts; prints one JSON object.

Run inside the guest by test_nfs.py. It uses no part of neuron_store: these are facts about NFS.
"""

import ctypes
import errno
import fcntl
import json
import os
import subprocess
import sys
import time

ONE, TWO = os.environ["NFS1"], os.environ["NFS2"]


def seconds_until(look, limit):
    began = time.monotonic()
    while not look():
        if time.monotonic() - began > limit:
            return limit
        time.sleep(0.1)
    return round(time.monotonic() - began, 1)


def code_of(call, *args):
    try:
        call(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"


def negative_lookup():
    os.mkdir(f"{ONE}/negative")
    os.listdir(f"{TWO}/negative")
    # The server's clock ticks meanwhile, so that the directory's new time differs from the old.
    time.sleep(0.2)
    assert not os.path.exists(f"{TWO}/negative/name")
    os.mkdir(f"{ONE}/negative/name")
    hidden = seconds_until(lambda: os.path.exists(f"{TWO}/negative/name"), 60)
    assert not os.path.exists(f"{TWO}/negative/other")
    os.mkdir(f"{ONE}/negative/other")
    before = os.path.exists(f"{TWO}/negative/other")
    listed = "other" in os.listdir(f"{TWO}/negative")
    return {
        "hidden_seconds": hidden,
        "hidden_seconds_in_one_tick": in_one_tick(),
        "listed_at_once": listed,
        "seen_after_listing": before or os.path.exists(f"{TWO}/negative/other"),
        "rename_onto_hidden": rename_onto_hidden(),
    }


def in_one_tick():
    """A name made in the very tick in which the client last saw the directory change."""
    os.mkdir(f"{ONE}/tick")
    os.listdir(f"{TWO}/tick")
    assert not os.path.exists(f"{TWO}/tick/name")
    os.mkdir(f"{ONE}/tick/name")
    return seconds_until(lambda: os.path.exists(f"{TWO}/tick/name"), 60)


def rename_onto_hidden():
    """What the loser of a race is told, who cannot see the winner."""
    assert not os.path.exists(f"{TWO}/negative/won")
    os.makedirs(f"{ONE}/negative/won/full")
    os.makedirs(f"{TWO}/negative/mine/full")
    return code_of(os.rename, f"{TWO}/negative/mine", f"{TWO}/negative/won")


def stale():
    os.mkdir(f"{ONE}/stale")
    with open(f"{ONE}/stale/file", "wb") as file:
        file.write(b"x" * 8_000_000)
    with open(f"{TWO}/stale/file", "rb", buffering=0) as reader:
        reader.read(4096)
        os.unlink(f"{ONE}/stale/file")
        time.sleep(4)  # past the attribute cache
        try:
            while reader.read(1 << 20):
                pass
        except OSError as error:
            return errno.errorcode[error.errno]
    return "read to its end"


def silly_names():
    os.mkdir(f"{ONE}/silly")
    path = f"{ONE}/silly/file"
    with open(path, "wb") as file:
        file.write(b"x")
        file.flush()
        os.unlink(path)
        names = os.listdir(f"{ONE}/silly")
        told = code_of(os.rmdir, f"{ONE}/silly")
    # The client removes it when it gets round to it.
    after = os.listdir(f"{ONE}/silly")
    give_up = time.monotonic() + 10
    while after and time.monotonic() < give_up:
        time.sleep(0.1)
        after = os.listdir(f"{ONE}/silly")
    return {
        "names_while_open": [n[:4] for n in names],
        "rmdir_while_open": told,
        "names_after_close": after,
    }


def flock():
    held = os.open(f"{ONE}/lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    code = (
        "import fcntl, os, sys; d = os.open(sys.argv[1], os.O_RDWR)\n"
        "try: fcntl.flock(d, fcntl.LOCK_EX | fcntl.LOCK_NB); print('got')\n"
        "except OSError: print('refused')"
    )
    excludes = {}
    for name, mount in (("one mount", ONE), ("two mounts", TWO)):
        ended = subprocess.run(
            [sys.executable, "-c", code, f"{mount}/lock"],
            capture_output=True,
            text=True,
            check=False,
        )
        excludes[name] = ended.stdout.strip() == "refused"
    os.close(held)
    return excludes


def noreplace():
    libc = ctypes.CDLL(None, use_errno=True)
    os.mkdir(f"{ONE}/from")
    if libc.renameat2(-100, f"{ONE}/from".encode(), -100, f"{ONE}/to".encode(), 1) == 0:
        return "ok"
    return errno.errorcode[ctypes.get_errno()]


def exclusive():
    os.mkdir(f"{ONE}/exclusive")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    os.close(os.open(f"{ONE}/exclusive/file", flags))
    os.mkdir(f"{ONE}/exclusive/source")
    open(f"{ONE}/exclusive/a", "wb").close()
    open(f"{ONE}/exclusive/b", "wb").close()
    return {
        "create": code_of(os.open, f"{TWO}/exclusive/file", flags),
        "link": code_of(os.link, f"{TWO}/exclusive/a", f"{TWO}/exclusive/b"),
        "mkdir": code_of(os.mkdir, f"{TWO}/exclusive/source"),
        "fsync_directory": code_of(sync, f"{ONE}/exclusive"),
    }


def sync(path):
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


checks = (negative_lookup, stale, silly_names, flock, noreplace, exclusive)
facts = {check.__name__: check() for check in checks}
print(json.dumps(facts))
