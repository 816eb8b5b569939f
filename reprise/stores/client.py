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
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore import exceptions
from obstore import store as stores

from reprise.storage.paths import exists
from reprise.stores.url import FILE_STORE, place_of

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
    """Requests to object stores, which take paths. A file on this host is an object, too.

    Several threads may call every method.

    All methods raise OSError: ENOENT for a missing object, EACCES for a refusal that a user must fix, such as wrong
    credentials or a missing bucket, ESTALE for a version other than the requested one, EIO for any other error after
    obstore's retries. Results other than bytes are JSON values.
    """

    def head(self, path: Path) -> tuple[int, str | None, float]:
        """Return an object's size, its version's ETag, if the store gives one, and its modification time."""
        with _opened(path) as place:
            meta: Any = obstore.head(*place)
        return meta["size"], meta["e_tag"], meta["last_modified"].timestamp()

    def read(self, path: Path, offset: int, size: int, etag: str | None = None) -> memoryview:
        """Return exactly `size` bytes from an object, starting at `offset`.

        Args:
            etag: The version to read. None reads any.

        Raises:
            OSError: EIO also if the body has another length.
        """
        options: Any = {"range": (offset, offset + size)}
        if etag is not None:
            options["if_match"] = etag
        with _opened(path) as place:
            body = memoryview(obstore.get(*place, options=options).bytes())
        if body.nbytes != size:
            raise OSError(errno.EIO, f"{body.nbytes} B of {size} B at {offset} arrived", str(path))
        return body

    def read_text(self, path: Path) -> str:
        """Return a small object's content."""
        with _opened(path) as place:
            return str(obstore.get(*place).bytes(), errors="replace")

    def objects(self, folder: Path) -> dict[str, tuple[int, float]]:
        """Return each object's size and modification time below a folder, by name in it."""
        with _opened(folder) as (store, key):
            metas = itertools.chain.from_iterable(obstore.list(store, key or None))
            return {
                meta["path"].removeprefix(f"{key}/"): (meta["size"], meta["last_modified"].timestamp())
                for meta in metas
            }

    def names(self, folder: Path) -> dict[str, bool]:
        """Return the names directly below a folder, and whether each is a folder."""
        with _opened(folder) as (store, key):
            listing = obstore.list_with_delimiter(store, key or None)
        paths = dict.fromkeys(listing["common_prefixes"], True) | {meta["path"]: False for meta in listing["objects"]}
        return {path.rpartition("/")[2]: is_folder for path, is_folder in paths.items()}

    def put(self, path: Path, source: Path) -> None:
        """Write an object with another's content.

        A large object goes up in equal parts, and appears with its last part. `PARTS_AT_ONCE` parts take memory, plus
        the one being read.
        """
        size, etag, _ = self.head(source)
        part = max(PART_BYTES, -(-size // (MOST_PARTS << 20)) << 20)
        with _opened(path) as place:
            writer = obstore.open_writer(*place, buffer_size=part, max_concurrency=PARTS_AT_ONCE)
            for offset in range(0, size, part):
                writer.write(self.read(source, offset, min(part, size - offset), etag))
            writer.close()  # an earlier error leaves no object

    def create(self, path: Path, text: str) -> bool:
        """Create a small object unless its name exists. Return whether it then has this content.

        A retried request meets its own object, and only the content distinguishes it from another writer's.
        """
        with _opened(path) as (store, key):
            try:
                obstore.put(store, key, text.encode(), mode="create")
                return True
            except (exceptions.AlreadyExistsError, FileExistsError):
                return self.read_text(path) == text

    def delete(self, folder: Path, names: Iterable[str]) -> None:
        """Delete objects below a folder by name. Missing objects are ignored.

        In the file system, folders that become empty are removed too, `folder` at the latest.
        """
        for name in names:
            path = folder / name
            with contextlib.suppress(FileNotFoundError), _opened(path) as place:
                obstore.delete(*place)
            if folder.parts[0] == "file:":
                with contextlib.suppress(OSError):  # not empty, or gone
                    for parent in path.parents:
                        if parent.is_relative_to(folder):
                            os.rmdir(Path("/", *parent.parts[1:]))


@functools.cache
def _open_store(root: str) -> Any:
    if root == FILE_STORE:
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
def _opened(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield an object's store and its key there, and translate obstore errors to file system errors."""
    try:
        store, key = place_of(path)
        yield _open_store(store), key
    except (exceptions.BaseError, OSError, ValueError) as error:  # the last for a name that no store takes
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _os_error(error, path) from error


def _os_error(error: Exception, path: Path) -> OSError:
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
    elif f"(os error {errno.EACCES})" in str(error):  # a file on this host
        number = errno.EACCES
    elif isinstance(error, exceptions.PreconditionError):
        number, text = errno.ESTALE, "the object was replaced while it was read"
    return OSError(number, text, str(path))
