"""One transfer by one S3 engine, in a process of its own, so that CPU and memory are its own.

    python -m benchmarks.s3_engines ENGINE put|get FOLDER URL NAME

FOLDER holds the files to put, or is empty to get into. URL is the server's, NAME a prefix in the
bucket `bench`. Prints one line of JSON: seconds, CPU seconds, peak MiB. Imports and connecting are
not counted, but for the programs (aws, rclone), which have no other way.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BUCKET = "bench"
SMALL = 16
"""Files at once, where an engine leaves it to its caller."""


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def ours(operation: str, folder: Path, url: str, name: str) -> Callable[[], Any]:
    from neuron_store.artifact import Artifact
    from neuron_store_backends.s3 import S3Store

    store = S3Store(f"{BUCKET}/{name}", endpoint_url=url)
    store.find("warm")
    if operation == "get":
        return lambda: store.fetch("k", folder)
    record = Path(os.environ["BENCH_RECORD"])
    files = json.loads(record.read_text())
    from neuron_store.artifact import ArtifactFile

    artifact = Artifact(key="k", files=tuple(ArtifactFile(**f) for f in files))
    return lambda: store.publish(artifact, folder)


def boto3(operation: str, folder: Path, url: str, name: str) -> Callable[[], Any]:
    import boto3
    from boto3.s3.transfer import TransferConfig

    client = boto3.client("s3", endpoint_url=url)
    client.list_objects_v2(Bucket=BUCKET, MaxKeys=1)
    config = TransferConfig(max_concurrency=SMALL)

    def put(file: str) -> None:
        client.upload_file(str(folder / file), BUCKET, f"{name}/{file}", Config=config)

    def get(file: str) -> None:
        client.download_file(BUCKET, f"{name}/{file}", str(folder / file), Config=config)

    def run() -> None:
        files = names(folder) if operation == "put" else listed()
        with ThreadPoolExecutor(SMALL if len(files) > 1 else 1) as pool:
            list(pool.map(put if operation == "put" else get, files))

    def listed() -> list[str]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{name}/")
        return [o["Key"].rsplit("/", 1)[1] for page in pages for o in page["Contents"]]

    return run


def s3fs(operation: str, folder: Path, url: str, name: str) -> Callable[[], Any]:
    import s3fs

    fs = s3fs.S3FileSystem(endpoint_url=url, use_listings_cache=False)
    fs.ls(BUCKET)
    if operation == "put":
        return lambda: fs.put(f"{folder}/", f"{BUCKET}/{name}/", recursive=True)
    return lambda: fs.get(f"{BUCKET}/{name}/", f"{folder}/", recursive=True)


def obstore(operation: str, folder: Path, url: str, name: str) -> Callable[[], Any]:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=url,
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )
    list(obstore.list(store, prefix="warm"))
    piece = 8 << 20

    def put(file: str) -> None:
        obstore.put(store, f"{name}/{file}", folder / file)

    def get(found: tuple[str, int]) -> None:
        path, size = found
        with (folder / path.rsplit("/", 1)[1]).open("wb") as out:
            if size <= piece:
                out.write(obstore.get(store, path).bytes())
                return

            def part(start: int) -> None:
                data = obstore.get_range(store, path, start=start, end=min(start + piece, size))
                os.pwrite(out.fileno(), data, start)

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(part, range(0, size, piece)))

    def run() -> None:
        if operation == "put":
            work: list[Any] = names(folder)
        else:
            work = [
                (o["path"], o["size"]) for page in obstore.list(store, prefix=name) for o in page
            ]
        with ThreadPoolExecutor(SMALL if len(work) > 1 else 1) as pool:
            list(pool.map(put if operation == "put" else get, work))

    return run


def aws(operation: str, folder: Path, url: str, name: str) -> Callable[[], Any]:
    there = f"s3://{BUCKET}/{name}/"
    way = [f"{folder}/", there] if operation == "put" else [there, f"{folder}/"]
    command = [os.environ["BENCH_AWS"], "s3", "cp", "--recursive", "--only-show-errors", *way]
    return lambda: subprocess.run([*command, "--endpoint-url", url], check=True)


def rclone(operation: str, folder: Path, url: str, name: str) -> Callable[[], Any]:
    there = f":s3,provider=Other,env_auth=true,endpoint='{url}':{BUCKET}/{name}"
    way = [str(folder), there] if operation == "put" else [there, str(folder)]
    program = str(Path(sys.executable).parent / "rclone")
    options = [f"--transfers={SMALL}", "--config=/dev/null", "--s3-no-check-bucket"]
    return lambda: subprocess.run([program, "copy", *options, *way], check=True)


ENGINES = {
    "neuron_store": ours,
    "boto3": boto3,
    "s3fs": s3fs,
    "obstore": obstore,
    "aws": aws,
    "rclone": rclone,
}


def main() -> None:
    engine, operation, folder, url, name = sys.argv[1:]
    run = ENGINES[engine](operation, Path(folder), url, name)
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)

    def cpu() -> float:
        return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, who))

    before, began = cpu(), time.perf_counter()
    run()
    spent = time.perf_counter() - began
    peak = max(resource.getrusage(w).ru_maxrss for w in who) / 1024
    print(json.dumps({"seconds": spent, "cpu": cpu() - before, "peak": peak}), flush=True)
    # obstore's threads, and botocore's, need not be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
