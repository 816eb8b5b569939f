"""The errors of requests to a store."""

from __future__ import annotations

import errno

import pytest

exceptions = pytest.importorskip("obstore.exceptions")
client = pytest.importorskip("reprise.stores.client")

ANSWER = """Generic S3 error: Error performing GET http://127.0.0.1:9/bucket in 3.5ms - Server returned non-2xx status
code: {status}: <?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>As the store has it</Message><RequestId>KKxk</RequestId></Error>"""


@pytest.mark.parametrize(
    ("kind", "code", "number", "fix"),
    [
        (exceptions.GenericError, "NoSuchBucket", errno.EACCES, "URL"),
        (FileNotFoundError, "NoSuchBucket", errno.EACCES, "URL"),
        (exceptions.PermissionDeniedError, "AccessDenied", errno.EACCES, "list, read, write"),
        (exceptions.PermissionDeniedError, "InvalidAccessKeyId", errno.EACCES, "AWS_ACCESS_KEY_ID"),
        (exceptions.PermissionDeniedError, "SignatureDoesNotMatch", errno.EACCES, "AWS_SECRET_ACCESS_KEY"),
        (exceptions.PermissionDeniedError, "RequestTimeTooSkewed", errno.EACCES, "clock"),
        (exceptions.PermissionDeniedError, "AccountProblem", errno.EACCES, "credentials"),
        (exceptions.GenericError, "ExpiredToken", errno.EACCES, ""),
        (exceptions.GenericError, "PermanentRedirect", errno.EACCES, "AWS_REGION"),
        (exceptions.GenericError, "SlowDown", errno.EIO, "As the store has it"),
        (FileNotFoundError, "NoSuchKey", errno.ENOENT, "No such file"),
    ],
)
def test_a_code_of_the_store_is_named_with_what_to_do(kind: type[Exception], code: str, number: int, fix: str) -> None:
    with pytest.raises(OSError, match=r"s3://bucket/run") as caught, client._translated("s3://bucket", "run"):
        raise kind(ANSWER.format(status=400, code=code))
    assert caught.value.errno == number
    assert fix in caught.value.strerror
    assert "<?xml" not in caught.value.strerror
    assert code in caught.value.strerror or number == errno.ENOENT
