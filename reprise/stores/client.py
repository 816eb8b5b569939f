"""Requests to object stores through obstore, whose threads do not survive a fork.

Only processes without forks import this module: a host's child (`reprise.stores.child`), and a mirror.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import obstore
from obstore import exceptions
from obstore import store as stores

from reprise.storage.paths import exists
from reprise.stores.url import StoreUrl, is_store_url

# An upload's grid: 8 MiB parts, or larger ones if a file would have more than MOST_PARTS. S3 and R2 take 10,000 parts,
# all equal except the last.
PART_BYTES = 8 << 20
MOST_PARTS = 9_000
PARTS_AT_ONCE = 8
# obstore's timeout covers a whole request with its body: 8 MiB at 256 KiB/s, after 30 s.
REQUEST_S = 62
RETRY_S = 120
# The codes of failures that only a user can fix, besides refused permissions.
_REFUSALS = {
    "NoSuchBucket",
    "ContainerNotFound",
    "ExpiredToken",
    "InvalidToken",
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
}
_ADVICE = "check the URL, the endpoint, the region (AWS_REGION), the credentials, their rights and this host's clock"


class StoreClient:
    """Requests to object stores. Several threads may call every method.

    All methods raise OSError: ENOENT for a missing object, EACCES for a refusal that a user must fix, such as wrong
    credentials or a missing bucket, ESTALE for a version other than the requested one, EIO for any other error after
    obstore's retries. Results other than bytes are JSON values.
    """

    def head(self, url: StoreUrl) -> tuple[int, str | None, float]:
        """Return an object's size, its version's ETag, if the store gives one, and its modification time."""
        with _translated(url):
            meta: Any = obstore.head(_open_store(url.root), url.key)
        return meta["size"], meta["e_tag"], meta["last_modified"].timestamp()

    def read(self, url: StoreUrl, offset: int, size: int, etag: str | None = None) -> memoryview:
        """Return exactly `size` bytes from an object, starting at `offset`.

        Args:
            etag: The version to read. None reads any.

        Raises:
            OSError: EIO also if the body has another length.
        """
        options: Any = {"range": (offset, offset + size)}
        if etag is not None:
            options["if_match"] = etag
        with _translated(url):
            body = memoryview(obstore.get(_open_store(url.root), url.key, options=options).bytes())
        if body.nbytes != size:
            raise OSError(errno.EIO, f"{body.nbytes} B of {size} B at {offset} arrived", str(url))
        return body

    def read_text(self, url: StoreUrl) -> str:
        """Return a small object's content."""
        with _translated(url):
            return str(obstore.get(_open_store(url.root), url.key).bytes(), errors="replace")

    def objects(self, folder: StoreUrl) -> dict[str, tuple[int, float]]:
        """Return each object's size and modification time below a folder, by name in it."""
        start = len(folder.child("").key)
        with _translated(folder):
            metas = itertools.chain.from_iterable(obstore.list(_open_store(folder.root), prefix=folder.key or None))
            return {meta["path"][start:]: (meta["size"], meta["last_modified"].timestamp()) for meta in metas}

    def names(self, folder: StoreUrl) -> dict[str, bool]:
        """Return the names directly below a folder, and whether each is a folder."""
        with _translated(folder):
            listing = obstore.list_with_delimiter(_open_store(folder.root), folder.key or None)
        paths = dict.fromkeys(listing["common_prefixes"], True) | {meta["path"]: False for meta in listing["objects"]}
        return {path.rpartition("/")[2]: is_folder for path, is_folder in paths.items()}

    def put(self, url: StoreUrl, source: str) -> None:
        """Write an object with a file's content, or another object's: `source` is a path or a URL.

        A large object goes up in equal parts, and appears with its last part. `PARTS_AT_ONCE` parts take memory, plus
        the one being read.
        """
        read: Callable[[int, int], bytes | memoryview]
        if is_store_url(source):
            origin = StoreUrl.parse(source)
            size, etag, _ = self.head(origin)
            read = partial(self.read, origin, etag=etag)
        else:
            size, read = os.stat(source).st_size, partial(_read_file, source)
        part = max(PART_BYTES, -(-size // (MOST_PARTS << 20)) << 20)
        with _translated(url):
            store = _open_store(url.root)
            writer = obstore.open_writer(store, url.key, buffer_size=part, max_concurrency=PARTS_AT_ONCE)
            for offset in range(0, size, part):
                writer.write(read(offset, min(part, size - offset)))
            writer.close()  # an earlier error leaves no object

    def create(self, url: StoreUrl, text: str) -> bool:
        """Create a small object unless its name exists. Return whether it then has this content.

        A retried request meets its own object, and only the content distinguishes it from another writer's.
        """
        with _translated(url):
            try:
                obstore.put(_open_store(url.root), url.key, text.encode(), mode="create")
                return True
            except (exceptions.AlreadyExistsError, FileExistsError):
                return self.read_text(url) == text

    def delete(self, folder: StoreUrl, names: Iterable[str]) -> None:
        """Delete objects below a folder by name. Missing objects are ignored.

        In the file system, folders that become empty are removed too, `folder` at the latest.
        """
        for name in names:
            url = folder.child(name)
            with contextlib.suppress(FileNotFoundError), _translated(url):
                obstore.delete(_open_store(url.root), url.key)
            if url.root == "file://":
                with contextlib.suppress(OSError):  # not empty, or gone
                    for parent in Path("/", url.key).parents:
                        if parent.is_relative_to(Path("/", folder.key)):
                            os.rmdir(parent)


def _read_file(path: str, offset: int, size: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size)


@functools.cache
def _open_store(root: str) -> Any:
    if root.startswith("file://"):
        return stores.LocalStore(prefix=Path("/"), mkdir=False)  # folders of the user stay
    options: dict[str, Any] = {"timeout": timedelta(seconds=REQUEST_S), "connect_timeout": timedelta(seconds=10)}
    retries = {"max_retries": 10, "retry_timeout": timedelta(seconds=RETRY_S)}
    settings: dict[str, Any] = {}
    if root.startswith("s3://"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        options["allow_http"] = endpoint.startswith("http://")  # the user asked for it with the URL
        settings = {"disable_bulk_delete": True, **_profile()}  # not every store has the other call
    return stores.from_url(root, client_options=options, retry_config=retries, **settings)  # type: ignore[call-overload]


def _profile() -> dict[str, Any]:
    """Return the setting for S3 credentials in a profile, which obstore does not read itself. Empty without one."""
    folder = Path.home() / ".aws"
    file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", folder / "credentials"))
    if "AWS_PROFILE" not in os.environ and ("AWS_ACCESS_KEY_ID" in os.environ or not exists(file)):
        return {}
    if importlib.util.find_spec("boto3") is None:
        raise OSError(errno.EACCES, "the credentials are in a profile: pip install boto3, or set AWS_ACCESS_KEY_ID")
    from obstore.auth.boto3 import Boto3CredentialProvider

    return {"credential_provider": Boto3CredentialProvider()}


@contextlib.contextmanager
def _translated(url: StoreUrl) -> Iterator[None]:
    """Translate obstore errors to file system errors, which callers can handle."""
    try:
        yield
    except (exceptions.BaseError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _os_error(error, url) from error


def _os_error(error: Exception, url: StoreUrl) -> OSError:
    answer = re.search(r"<Code>(\w+)</Code>(?:\s*<Message>([^<]*))?", str(error))
    code, message = answer.groups("") if answer else ("", "")
    text = ": ".join(filter(None, [code, message])) or " ".join(str(error).split("\n", 1)[0].split())[:300]
    is_denied = isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError))
    number = errno.EIO
    # The answer to a HEAD request names no code.
    if code in _REFUSALS or is_denied or (not code and "400 Bad Request" in text):
        number, text = errno.EACCES, f"the store refuses the request ({text}): {_ADVICE}"
    elif isinstance(error, (exceptions.NotFoundError, FileNotFoundError)):
        number, text = errno.ENOENT, os.strerror(errno.ENOENT)
    elif isinstance(error, exceptions.PreconditionError):
        number, text = errno.ESTALE, "the object was replaced while it was read"
    return OSError(number, text, str(url))
