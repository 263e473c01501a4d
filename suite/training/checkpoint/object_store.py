"""The file system behind a folder or a URL, as fsspec presents it; S3 and Google Cloud Storage by pyarrow's own.

s3fs and gcsfs do not install beside the pinned aiohttp and botocore's dependencies; pyarrow is here anyway.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow.fs import FileSystem, S3FileSystem

from suite.errors import CheckpointError


class _ArrowStore(ArrowFSWrapper):
    """pyarrow's file system as fsspec's."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Returns a file's bytes; fsspec's own reads a stream that cannot tell its position where ``end`` is given."""
        data: bytes = super().cat_file(path, start, end, **({"seekable": True} | options))
        return data


def check_url(location: str) -> None:
    """Raises CheckpointError, without the URL, for an S3 URL with more in it than a bucket and a path."""
    if not location.startswith("s3://"):
        return
    parts = urlsplit(location)
    if set("@:") & set(parts.netloc) or parts.query or parts.fragment:
        raise CheckpointError(
            "an s3:// URL may have only a bucket and a path, such as s3://bucket/runs: keys and options are taken from "
            "the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL) or ~/.aws, "
            "because the URL is printed and recorded"
        )


def open_store(location: str) -> tuple[Any, str]:
    """Returns a file system and the path of a folder or a URL in it. Credentials, region and endpoint of S3 are those
    of the environment (AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, ...) or of ~/.aws.

    Raises CheckpointError for an S3 URL that has keys or options in it, ValueError or ImportError for a URL of an
    unknown kind, OSError where a bucket's region cannot be found.
    """
    check_url(location)
    if location.startswith(("s3://", "gs://")):
        files, root = FileSystem.from_uri(location)
        if isinstance(files, S3FileSystem):  # as from_uri made it, a silent server is waited for ten times as long
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            files = S3FileSystem(region=files.region, endpoint_override=endpoint, allow_delayed_open=True)
        return _ArrowStore(files), root
    # what another worker has just written must be seen
    found: tuple[Any, str] = fsspec.url_to_fs(location, use_listings_cache=False)
    return found
