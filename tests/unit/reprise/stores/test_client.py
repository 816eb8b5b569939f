"""The errors of requests to a store."""

from __future__ import annotations

from errno import EACCES, EIO, ENOENT
from pathlib import Path

import pytest

from reprise.stores.path import store_path

exceptions = pytest.importorskip("obstore.exceptions")
client = pytest.importorskip("reprise.stores.client")

DENIED = exceptions.PermissionDeniedError
ANSWER = """Generic S3 error: Error performing GET http://127.0.0.1:9/bucket in 3.5ms - Server returned non-2xx status
code: {status}: <?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>As the store has it</Message><RequestId>KKxk</RequestId></Error>"""


@pytest.mark.parametrize(
    ("kind", "code", "number", "text"),
    [
        (exceptions.GenericError, "NoSuchBucket", EACCES, "check the URL"),
        (FileNotFoundError, "NoSuchBucket", EACCES, "check the URL"),
        (DENIED, "AccountProblem", EACCES, "credentials"),
        (exceptions.GenericError, "ExpiredToken", EACCES, "credentials"),
        (exceptions.GenericError, "PermanentRedirect", EACCES, "AWS_REGION"),
        (exceptions.GenericError, "SlowDown", EIO, "As the store has it"),
        (FileNotFoundError, "NoSuchKey", ENOENT, "No such file"),
    ],
)
def test_a_code_of_the_store_is_named_with_what_to_do(kind: type[Exception], code: str, number: int, text: str) -> None:
    with (
        pytest.raises(OSError, match=r"file:///bucket/run") as caught,
        client._opened(store_path("file:///bucket/run")),
    ):
        raise kind(ANSWER.format(status=400, code=code))
    assert caught.value.errno == number
    assert text in caught.value.strerror
    assert "<?xml" not in caught.value.strerror
    assert code in caught.value.strerror or number == ENOENT


def test_a_file_that_may_not_be_read_ends_a_mirror() -> None:
    error = exceptions.GenericError("Unable to open file /x: Permission denied (os error 13)")
    with pytest.raises(PermissionError, match="'/x'"), client._opened(Path("/x")):
        raise error
