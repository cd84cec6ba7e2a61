"""Where a corpus lies: a directory, or a prefix on an S3 server that speaks plain HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

BUCKET = "bench"


@dataclass(frozen=True)
class Place:
    """url: a directory, or s3://bucket/prefix on the server at `endpoint`. cache: an empty directory for this run."""

    url: str
    cache: str
    endpoint: str | None = None
    key: str = ""
    secret: str = ""

    @property
    def remote(self) -> bool:
        return self.endpoint is not None

    @property
    def s3fs_options(self) -> dict[str, Any]:
        """What s3fs is told; {} for a directory."""
        if not self.remote:
            return {}
        return {"key": self.key, "secret": self.secret, "client_kwargs": {"endpoint_url": self.endpoint}}

    def client(self) -> Any:
        """boto3's client of the server."""
        return boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id=self.key, aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )  # fmt: skip

    def names(self) -> list[str]:
        """The objects under the prefix, or the files in the directory, in order of their names."""
        if not self.remote:
            return sorted(str(path) for path in Path(self.url).rglob("*") if path.is_file())
        prefix = self.url.removeprefix(f"s3://{BUCKET}/")
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix + "/")
        return sorted(found["Key"] for page in pages for found in page.get("Contents", ()))

    def upload(self, directory: Path) -> None:
        """Copy every file under `directory` there."""
        client, prefix = self.client(), self.url.removeprefix(f"s3://{BUCKET}/")
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            client.upload_file(str(path), BUCKET, f"{prefix}/{path.relative_to(directory)}")
