"""Requests to an object store through obstore, whose threads do not survive a fork.

Only a host's child process imports this module: `reprise.stores.child`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import obstore
from obstore import exceptions, store

from reprise.storage.paths import exists
from reprise.stores.url import StoreUrl

# An upload's grid: 8 MiB parts, or larger ones if a file would have more than MOST_PARTS. S3 and R2 take 10,000 parts,
# all equal except the last.
PART_BYTES = 8 << 20
MOST_PARTS = 9_000
PARTS_AT_ONCE = 4
# obstore's timeout covers a whole request with its body. A body may be as slow as this, beside SETUP_S.
SLOWEST_BYTES_PER_S = 256 << 10
SETUP_S = 30
CONFLICT_WAITS_S = (0.05, 0.2, 1.0)
RETRY_S = 120
_NO_BUCKET = "the bucket does not exist: create it, or correct the URL"
_REFUSES = "the store refuses the credentials"
_REGION = "the bucket is in another region: set AWS_REGION"
# Failures that only a user can fix, by the code in the store's answer.
_REFUSALS = {
    "NoSuchBucket": _NO_BUCKET,
    "ContainerNotFound": _NO_BUCKET,
    "AccessDenied": f"{_REFUSES}: allow them to list, read, write and delete there",
    "InvalidAccessKeyId": f"{_REFUSES}: correct AWS_ACCESS_KEY_ID, or AWS_ENDPOINT_URL",
    "SignatureDoesNotMatch": f"{_REFUSES}: correct AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": f"{_REFUSES}: renew them",
    "InvalidToken": f"{_REFUSES}: renew them",
    "RequestTimeTooSkewed": "this host's clock differs from the store's: set it",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
}


class StoredObject(NamedTuple):
    """An object in a store.

    Args:
        key: Its name in the store.
        size: Its size in bytes.
        etag: Its version's ETag. None if the store gives none.
        modified_at: When it was modified, in Unix time.
    """

    key: str
    size: int
    etag: str | None
    modified_at: float


class StoreClient:
    """Requests to one store. Several threads may call every method.

    All methods raise OSError: ENOENT for a missing object, EACCES for a refusal that a user must fix, such as wrong
    credentials or a missing bucket, ESTALE for a version other than the requested one, EIO for any other error after
    obstore's retries.

    Args:
        root: The store, as in `StoreUrl.root`.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._stores: dict[int, Any] = {}

    def head(self, key: str) -> StoredObject:
        """Return an object's size and version."""
        with _translated(self.root, key):
            return _stored(obstore.head(self._store(), key))

    def read(self, key: str, offset: int, size: int, etag: str | None = None) -> memoryview:
        """Return exactly `size` bytes from an object, starting at `offset`.

        Args:
            etag: The version to read. None reads any.

        Raises:
            OSError: EIO also if the body has another length.
        """
        if size == 0:
            return memoryview(b"")
        options: Any = {"range": (offset, offset + size)}
        if etag is not None:
            options["if_match"] = etag
        with _translated(self.root, key):
            body = memoryview(obstore.get(self._store(size), key, options=options).bytes())
        if body.nbytes != size:
            raise _error(errno.EIO, f"{body.nbytes} B of {size} B at {offset} arrived", self.root, key)
        return body

    def read_whole(self, key: str) -> bytes:
        """Return a small object's content."""
        return bytes(self.read(key, 0, self.head(key).size))

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects below a folder, in any order."""
        with _translated(self.root, prefix):
            for batch in obstore.list(self._store(), prefix=prefix or None):
                yield from map(_stored, batch)

    def names(self, prefix: str) -> tuple[list[str], list[str]]:
        """Return the names of folders and objects directly below a folder."""
        with _translated(self.root, prefix):
            page = obstore.list_with_delimiter(self._store(), prefix=prefix or None)
        paths = page["common_prefixes"], [entry["path"] for entry in page["objects"]]
        folders, objects = ([str(path).rstrip("/").rpartition("/")[2] for path in group] for group in paths)
        return sorted(folders), objects

    def put(self, key: str, data: bytes | Path) -> None:
        """Write an object. A large file goes up in equal parts: the object appears with its last part.

        A file takes `PARTS_AT_ONCE` parts in memory, plus the one being read.
        """
        size = len(data) if isinstance(data, bytes) else os.stat(data).st_size
        part, waits = part_bytes(size), list(CONFLICT_WAITS_S)
        with _translated(self.root, key):
            while True:
                try:
                    obstore.put(
                        self._store(part), key, data,
                        use_multipart=size > PART_BYTES, chunk_size=part, max_concurrency=PARTS_AT_ONCE,
                    )  # fmt: skip
                    return
                except exceptions.AlreadyExistsError:  # a 409: another request for the object was under way
                    if not waits:
                        raise
                    time.sleep(waits.pop(0))

    def put_parts(self, key: str, size: int, parts: Iterable[memoryview]) -> None:
        """Write an object whose bytes come in parts, given its size."""
        part = part_bytes(size)
        with _translated(self.root, key):
            writer = obstore.open_writer(self._store(part), key, buffer_size=part, max_concurrency=PARTS_AT_ONCE)
            for body in parts:
                writer.write(body)
            writer.close()  # an earlier error leaves no object

    def create(self, key: str, data: bytes) -> bool:
        """Create a small object unless its name exists. Return whether it then has this content.

        A retried request meets its own object, and only the content distinguishes it from another writer's.
        """
        with _translated(self.root, key):
            try:
                obstore.put(self._store(), key, data, mode="create")
                return True
            except (exceptions.AlreadyExistsError, FileExistsError):
                return self.read_whole(key) == data

    def delete(self, keys: Iterable[str], within: str | None = None) -> None:
        """Delete objects. Missing objects are ignored.

        Args:
            within: A folder. In the file system it is also removed, as are those below it, once they are empty.
        """
        for key in keys:
            with contextlib.suppress(FileNotFoundError), _translated(self.root, key):
                obstore.delete(self._store(), key)
            if within is not None and self.root == "file://":
                with contextlib.suppress(OSError):  # not empty, or gone
                    for folder in Path("/", key).parents:
                        if folder.is_relative_to(Path("/", within)):
                            os.rmdir(folder)

    def new_folder(self, key: str) -> str:
        """Return the outermost folder that a write into a folder would create. In an object store, the folder."""
        names = key.split("/") if self.root == "file://" else []
        outer = ("/".join(names[:count]) for count in range(1, len(names)))
        return next((folder for folder in outer if not exists(Path("/", folder))), key)

    def _store(self, request_bytes: int = 0) -> Any:
        """Return an obstore store whose timeout suits this request size."""
        timeout_s = SETUP_S + math.ceil(request_bytes / SLOWEST_BYTES_PER_S)
        if timeout_s not in self._stores:
            self._stores[timeout_s] = _open_store(self.root, timeout_s)
        return self._stores[timeout_s]


def part_bytes(file_bytes: int) -> int:
    """Return the part size for uploading a file, a multiple of 1 MiB."""
    smallest = math.ceil(file_bytes / MOST_PARTS)
    return max(PART_BYTES, (smallest + (1 << 20) - 1) >> 20 << 20)


def _open_store(root: str, timeout_s: int) -> Any:
    if root.startswith("file://"):
        return store.LocalStore(prefix=Path("/"), mkdir=False)  # folders of the user stay
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "connect_timeout": timedelta(seconds=10)}
    retries = {"max_retries": 10, "retry_timeout": timedelta(seconds=RETRY_S)}
    settings: dict[str, Any] = {}
    if root.startswith("s3://"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        options["allow_http"] = endpoint.startswith("http://")  # the user asked for it with the URL
        settings["disable_bulk_delete"] = True  # not every store has the other call
        if _needs_profile():
            settings["credential_provider"] = _profile_credentials()
    return store.from_url(root, client_options=options, retry_config=retries, **settings)  # type: ignore[call-overload]


def _needs_profile() -> bool:
    """Return whether S3 credentials lie in a profile, which obstore does not read itself."""
    folder = Path.home() / ".aws"
    file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", folder / "credentials"))
    is_in_environment = "AWS_ACCESS_KEY_ID" in os.environ and "AWS_PROFILE" not in os.environ
    return not is_in_environment and ("AWS_PROFILE" in os.environ or exists(file))


def _profile_credentials() -> Any:
    if importlib.util.find_spec("boto3") is None:
        raise OSError(errno.EACCES, "the credentials are in a profile: pip install boto3, or set AWS_ACCESS_KEY_ID")
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider()


def _stored(meta: Any) -> StoredObject:
    return StoredObject(meta["path"], meta["size"], meta["e_tag"], meta["last_modified"].timestamp())


@contextlib.contextmanager
def _translated(root: str, key: str) -> Iterator[None]:
    """Translate obstore errors to file system errors, which callers can handle."""
    try:
        yield
    except (exceptions.BaseError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _os_error(error, root, key) from error


def _os_error(error: Exception, root: str, key: str) -> OSError:
    answer = re.search(r"<Code>(\w+)</Code>(?:\s*<Message>([^<]*))?", str(error))
    code, message = answer.groups("") if answer else ("", "")
    text = ": ".join(filter(None, [code, message])) or " ".join(str(error).split("\n", 1)[0].split())[:300]
    if code in _REFUSALS:
        return _error(errno.EACCES, f"{_REFUSALS[code]} ({text})", root, key)
    if not code and "400 Bad Request" in text:  # of a HEAD request, whose answer names no reason
        return _error(
            errno.EACCES, f"{_REFUSES}, or is in another region: correct AWS_REGION, or renew them", root, key
        )
    if isinstance(error, (exceptions.NotFoundError, FileNotFoundError)):
        return _error(errno.ENOENT, os.strerror(errno.ENOENT), root, key)
    if isinstance(error, exceptions.PreconditionError):
        return _error(errno.ESTALE, "the object was replaced while it was read", root, key)
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        return _error(errno.EACCES, f"{_REFUSES}: {text}", root, key)
    return _error(errno.EIO, text, root, key)


def _error(number: int, text: str, root: str, key: str) -> OSError:
    return OSError(number, text, str(StoreUrl(root, key)))
