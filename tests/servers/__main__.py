"""Runs the servers that the tests use, to try things by hand: `make servers`, or this module.

    python -m tests.servers [moto] [seaweed] [azurite] [gcs]

In the foreground, on free ports of 127.0.0.1, everything in memory or in a directory that goes
with them. For each, the lines to paste into a shell. Ctrl-C stops them all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import signal
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers.processes import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BUCKET = "neuron-store"


def start_moto(stack: contextlib.ExitStack, folder: Path) -> Mapping[str, str]:
    from tests.servers.moto import MotoServer

    del folder
    server = stack.enter_context(MotoServer())
    server.client().create_bucket(Bucket=BUCKET)
    return _s3(server.url)


def start_seaweed(stack: contextlib.ExitStack, folder: Path) -> Mapping[str, str]:
    from tests.servers.seaweed import client, seaweed

    url = stack.enter_context(seaweed(folder))
    client(url).create_bucket(Bucket=BUCKET)
    return _s3(url)


def _s3(url: str) -> Mapping[str, str]:
    from tests.servers.moto import CREDENTIALS

    return {**CREDENTIALS, "NEURON_STORE_TIERS": f"s3://{BUCKET}/cache?endpoint_url={url}"}


def start_azurite(stack: contextlib.ExitStack, folder: Path) -> Mapping[str, str]:
    from azure.storage.blob import BlobServiceClient

    from tests.servers.azurite import azurite, connection_string

    told = connection_string(stack.enter_context(azurite(folder)))
    with BlobServiceClient.from_connection_string(told) as service:
        service.create_container(BUCKET)
    return {
        "AZURE_STORAGE_CONNECTION_STRING": told,
        "NEURON_STORE_TIERS": f"az://{BUCKET}/cache",
    }


def start_gcs(stack: contextlib.ExitStack, folder: Path) -> Mapping[str, str]:
    from tests.servers.gcs import fake_gcs

    url = stack.enter_context(fake_gcs(folder))
    request = urllib.request.Request(
        f"{url}/storage/v1/b?project=p",
        data=json.dumps({"name": BUCKET}).encode(),
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=30).close()
    return {"NEURON_STORE_TIERS": f"gs://{BUCKET}/cache?endpoint_url={url}&anon=1"}


SERVERS: Mapping[str, tuple[str, Callable[..., Mapping[str, str]]]] = {
    "moto": ("S3 by moto, in memory", start_moto),
    "seaweed": ("S3 by SeaweedFS, a real server", start_seaweed),
    "azurite": ("Azure Blob Storage by Azurite, Microsoft's emulator", start_azurite),
    "gcs": ("Google Cloud Storage by fake-gcs-server", start_gcs),
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in SERVERS]
    if unknown:
        print(f"no server {unknown[0]!r}; there are: {', '.join(SERVERS)}", file=sys.stderr)
        return 2
    # One line for each request would bury what is to be pasted.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    running = 0
    with contextlib.ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neuron_store-servers-")))
        for name in names or SERVERS:
            if stop.is_set():
                break
            about, start = SERVERS[name]
            folder = top / name
            folder.mkdir()
            try:
                lines = start(stack, folder)
            except (Unavailable, ImportError) as error:
                print(f"# {about}: cannot be had here: {error}\n", flush=True)
                continue
            running += 1
            print(f"# {about}")
            for variable, value in lines.items():
                print(f"export {variable}={shlex.quote(value)}")
            print(flush=True)
        if not running:
            return 1
        print("# try: neuron-store doctor; Ctrl-C here stops the servers", flush=True)
        stop.wait()
        print("# stopping them; SeaweedFS takes some seconds", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
