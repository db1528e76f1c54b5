"""Back doors: how tests set up and look at what the tiers did, without the tiers."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
import uuid
from typing import Any

from neuron_store_backends.s3 import S3Store


class S3Place:
    """A new bucket of an S3 server, through boto3."""

    forks = True

    def __init__(self, client: Any, url: str, *, bucket: str | None = None, **options: Any) -> None:
        self.client = client
        self.url = url
        self.options = options
        name = f"b-{uuid.uuid4().hex[:20]}"
        # SeaweedFS gives each bucket volumes of its own, of which it has few.
        self.bucket = bucket or name
        self.top = f"{name}/" if bucket else ""
        self.prefix = f"{self.top}team/cache"
        if bucket is None:
            client.create_bucket(Bucket=self.bucket)

    def store(self, **options: Any) -> S3Store:
        return S3Store(
            f"{self.bucket}/{self.prefix}", endpoint_url=self.url, **{**self.options, **options}
        )

    def put(self, path: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{path}", Body=data)

    def read(self, path: str) -> bytes:
        answer = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{path}")
        return answer["Body"].read()

    def remove(self, path: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/{path}")

    def paths(self) -> list[str]:
        """Everything of this place: what lies outside the prefix shows as its full name."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.top
        )
        names = [o["Key"] for page in pages for o in page.get("Contents", [])]
        return sorted(n.removeprefix(self.prefix + "/") for n in names)

    def dangling(self) -> list[str]:
        """Multipart uploads that nobody ended."""
        found = self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        return [upload["Key"] for upload in found]


class AzurePlace:
    """A new container, through Azure's own synchronous client."""

    forks = True

    def __init__(self, url: str) -> None:
        from azure.storage.blob import BlobServiceClient

        from tests.servers.azurite import connection_string

        self.bucket = self.container = f"c-{uuid.uuid4().hex[:20]}"
        self.prefix = "team/cache"
        service = BlobServiceClient.from_connection_string(connection_string(url))
        self.client = service.create_container(self.container)

    def store(self, **options: Any) -> Any:
        from neuron_store_backends.azure import AzureStore

        return AzureStore(f"{self.container}/{self.prefix}", **options)

    def put(self, path: str, data: bytes) -> None:
        self.client.upload_blob(f"{self.prefix}/{path}", data, overwrite=True)

    def read(self, path: str) -> bytes:
        return self.client.download_blob(f"{self.prefix}/{path}").readall()

    def remove(self, path: str) -> None:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            self.client.delete_blob(f"{self.prefix}/{path}")
        except ResourceNotFoundError:
            pass

    def paths(self) -> list[str]:
        return sorted(n.removeprefix(self.prefix + "/") for n in self.client.list_blob_names())


class GcsPlace:
    """A new bucket, through plain HTTP requests."""

    forks = True

    def __init__(self, url: str) -> None:
        self.url = self.endpoint = url
        self.bucket = f"b-{uuid.uuid4().hex[:20]}"
        self.prefix = "team/cache"
        self._ask("POST", "storage/v1/b?project=p", json.dumps({"name": self.bucket}).encode())

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self.url}/{path}", data=body, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def _name(self, path: str) -> str:
        return urllib.parse.quote(f"{self.prefix}/{path}", safe="")

    def store(self, **options: Any) -> Any:
        from neuron_store_backends.gcs import GCSStore

        return GCSStore(
            f"{self.bucket}/{self.prefix}",
            **{"endpoint_url": self.endpoint, "anon": True, **options},
        )

    def put(self, path: str, data: bytes) -> None:
        where = f"upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={self._name(path)}"
        self._ask("POST", where, data)

    def read(self, path: str) -> bytes:
        return self._ask("GET", f"storage/v1/b/{self.bucket}/o/{self._name(path)}?alt=media")

    def remove(self, path: str) -> None:
        try:
            self._ask("DELETE", f"storage/v1/b/{self.bucket}/o/{self._name(path)}")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise

    def paths(self) -> list[str]:
        items = json.loads(self._ask("GET", f"storage/v1/b/{self.bucket}/o")).get("items", [])
        return sorted(item["name"].removeprefix(self.prefix + "/") for item in items)
