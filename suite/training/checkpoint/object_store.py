"""The fsspec file system of a folder or a URL. S3 and Google Cloud Storage use pyarrow's file systems.

s3fs and gcsfs conflict with the pinned aiohttp and botocore's dependencies; pyarrow is installed anyway.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FileSystem, S3FileSystem

from suite.errors import CheckpointError


class _ArrowStore(ArrowFSWrapper):
    """A pyarrow file system with fsspec's interface."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Returns a file's bytes. Opens it seekable, because fsspec's own version fails when ``end`` is given."""
        return super().cat_file(path, start, end, **({"seekable": True} | options))


def check_url(location: str) -> None:
    """Raises CheckpointError for an S3 URL with more than a bucket and a path. The message does not show the URL."""
    if not location.startswith("s3://"):
        return
    parts = urlsplit(location)
    if set("@:") & set(parts.netloc) or parts.query or parts.fragment:
        raise CheckpointError(
            "an s3:// URL may have only a bucket and a path, such as s3://bucket/runs: set keys and options in the "
            "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL) or in ~/.aws, "
            "because the URL is printed and recorded"
        )


def open_store(location: str) -> tuple[Any, str]:
    """Returns the file system of a folder or URL, and the path in it. S3's credentials, region and endpoint come from
    the environment (AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, ...) or from ~/.aws.

    Raises CheckpointError for an S3 URL with keys or options in it, ValueError or ImportError for an unknown kind of
    URL, OSError when a bucket's region cannot be found.
    """
    check_url(location)
    if "://" not in location:  # fsspec would take "::" in a path for a chain of URLs
        return LocalFileSystem(), os.path.abspath(location)
    if location.startswith(("s3://", "gs://")):
        files, root = FileSystem.from_uri(location)
        if isinstance(files, S3FileSystem):  # from_uri's own object waits ten times as long for a silent server
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            files = S3FileSystem(region=files.region, endpoint_override=endpoint, allow_delayed_open=True)
        return _ArrowStore(files), root
    # no cache, so that files just written by other workers are visible
    return fsspec.url_to_fs(location, use_listings_cache=False)
