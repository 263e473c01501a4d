"""URLs of object stores that are refused before anything is sent."""

from __future__ import annotations

import pytest

from suite.errors import CheckpointError, SuiteError
from suite.training.checkpoint import Storage
from suite.training.checkpoint.object_store import check_url, open_store


@pytest.mark.parametrize(
    "url",
    [
        "s3://AK:SECRET@bucket/x?region=us-east-1&endpoint_override=127.0.0.1:1&scheme=http",
        "s3://AK:SEC/RET@bucket/x",
        "s3://AK@bucket/x",
        "s3://bucket/x?region=us-east-1",
        "s3://bucket:9000/x",
        "s3://bucket/x#part",
    ],
)
def test_keys_and_options_in_an_s3_url_are_refused_and_not_repeated(url: str):
    for opened in (open_store, Storage):
        with pytest.raises(CheckpointError, match="set keys and options in the environment") as caught:
            opened(url)
        assert isinstance(caught.value, SuiteError)  # exit code 2
        assert "AK" not in str(caught.value).replace("AKE", "")
        assert "SEC" not in str(caught.value).replace("AWS_SECRET_ACCESS_KEY", "")


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/runs/a@b:c", "gs://anonymous@bucket/x", "/a/folder?x"])
def test_other_places_are_not_refused(url: str):
    check_url(url)
