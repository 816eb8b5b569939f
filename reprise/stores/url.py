"""Object store URLs: s3, gs and az, and file for a folder treated as a store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from reprise.errors import ConfigError

_SCHEME = re.compile(r"(?:s3|gs|az|file)://", re.IGNORECASE)
_SEGMENT = r"(?!\.{1,2}(?:/|$)) [^/?#]+"
_URL = re.compile(
    rf"""
    (?: (?P<scheme>s3|gs|az) :// (?P<bucket>[a-z0-9][a-z0-9._-]{{1,254}}) (?:/|$)
      | file:// (?![^/]*[@:]) /* )
    (?P<key> (?: {_SEGMENT} (?: /{_SEGMENT} )* )? ) /*
    """,
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A place in a store.

    Args:
        root: The store: `s3://bucket`, or `file://` for this host's file system.
        key: The name in it, without slashes at either end. Empty for the store itself.
    """

    root: str
    key: str

    @staticmethod
    def parse(text: str) -> StoreUrl:
        """Return the place that a URL names.

        Raises:
            ConfigError: The URL has another scheme, no bucket, a user and password, a query, or a key with `.`, `..` or
                an empty segment.
        """
        match = _URL.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                "This is not a store URL",
                expected="s3://bucket/folder, gs://, az:// or file:///folder, without a user, a query, an empty "
                "segment, `.` or `..`",
                found=_without_secret(text),
                fix="Put credentials in environment variables, such as AWS_ACCESS_KEY_ID, or in the store's credential "
                "files. For a mounted file system, use a path. Download a hub's folder first: `hf download`.",
            )
        return StoreUrl(
            f"{match['scheme'].lower()}://{match['bucket']}" if match["scheme"] else "file://", match["key"]
        )

    def __str__(self) -> str:
        """Return the URL without a trailing slash."""
        return f"{self.root}/{self.key}" if self.key else self.root

    def require_outside(self, folder: Path) -> None:
        """Refuse a mirror inside the mirrored folder: its retention would delete the folder's own checkpoints.

        Raises:
            ConfigError: This place is the folder, or below it.
        """
        if self.root == "file://" and Path("/", self.key).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                "The mirror is inside the folder that it mirrors",
                where=folder,
                expected="a location outside it",
                found=self,
                fix="Choose a URL outside the folder.",
            )

    def child(self, name: str) -> StoreUrl:
        """Return the place for a name below this place."""
        return StoreUrl(self.root, f"{self.key}/{name}" if self.key else name)


def is_store_url(text: str) -> bool:
    """Return whether a text starts like a store URL."""
    return _SCHEME.match(text.strip()) is not None


def _without_secret(text: str) -> str:
    """Return a URL without a possible user, password or signature."""
    head, _, tail = text.partition("://")
    return re.sub(r"[?#].*", "?...", f"{head}://{re.sub(r'^[^/]*:.*@|^[^/]*@', '...@', tail)}") if tail else text
