"""Object store URLs: s3, gs and az, and file for a folder treated as a store."""

from __future__ import annotations

import re
from pathlib import Path

FILE_STORE = "file://"  # this host's file system
_SCHEME = re.compile(r"(?:s3|gs|az|file)://", re.IGNORECASE)


def is_store_url(text: str) -> bool:
    """Return whether a text starts like a store URL."""
    return _SCHEME.match(text.strip()) is not None


def place_of(path: Path) -> tuple[str, str]:
    """Return a path's store, such as `s3://bucket`, and its key there. A path on this host is in `FILE_STORE`."""
    scheme, *names = path.parts
    if path.is_absolute() or scheme == "file:":
        return FILE_STORE, "/".join(names)
    return f"{scheme}//{''.join(names[:1])}", "/".join(names[1:])
