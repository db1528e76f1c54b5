"""Back doors: how tests set up and look at what the tiers did, without the tiers."""

from __future__ import annotations

import uuid
from typing import Any

from neuron_store_backends.s3 import S3Store


class S3Place:
    """A new bucket of an S3 server, through boto3."""

    forks = True

    def __init__(self, client: Any, url: str, **options: Any) -> None:
        self.client = client
        self.url = url
        self.options = options
        self.bucket = f"b-{uuid.uuid4().hex[:20]}"
        self.prefix = "team/cache"
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
        """Everything in the bucket: what lies outside the prefix shows as its full name."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        names = [o["Key"] for page in pages for o in page.get("Contents", [])]
        return sorted(n.removeprefix(self.prefix + "/") for n in names)

    def dangling(self) -> list[str]:
        """Multipart uploads that nobody ended."""
        found = self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        return [upload["Key"] for upload in found]
