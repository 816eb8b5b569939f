"""Tests a store below a URL: writes, reads, conditional creation, deletions."""

from __future__ import annotations

import secrets

from reprise.stores.path import store_path
from reprise.stores.store import CHILD_CLIENT

_NOT_HONORED = "not honored: of two programs that create an object, each believes to be first"


def probe_store(text: str) -> list[tuple[str, bool | None, str]]:
    """Test a store below a URL. If a request fails, an object may stay there.

    Returns:
        What was tested, whether it is fine, and the finding. None if the store is usable but lacks a feature.

    Raises:
        ConfigError: The URL is malformed, or obstore is not installed.
    """
    folder = store_path(text) / f".doctor-{secrets.token_hex(4)}"
    once, what = folder / "once", "objects"
    try:
        CHILD_CLIENT.create(once, "first")
        is_twice = CHILD_CLIENT.create(once, "second")
        CHILD_CLIENT.read_text(once)
        CHILD_CLIENT.delete(folder, ["once"])
    except OSError as error:
        return [(what, False, str(error.strerror))]
    found = _NOT_HONORED if is_twice else "a second creation of an object is refused"
    return [
        (what, True, "can be created, read and deleted"),
        ("conditional creation", None if is_twice else True, found),
    ]
