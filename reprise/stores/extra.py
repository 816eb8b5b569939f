"""The package for stores, which is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from reprise.errors import ConfigError
from reprise.stores.url import StoreUrl

if TYPE_CHECKING:
    from reprise.stores.client import StoreClient
    from reprise.stores.probe import StoreFinding


def require_extra(where: object) -> None:
    """Refuse a store without the package for it.

    Raises:
        ConfigError: if obstore is not installed.
    """
    if importlib.util.find_spec("obstore") is None:
        raise ConfigError(
            "A package for object stores is missing",
            where=where,
            expected="obstore",
            fix="pip install 'torch-reprise[store]'",
        )


def probe_store(text: str) -> Iterator[StoreFinding]:
    """Yield what a store can do below a URL; this process must not fork afterwards.

    Raises:
        ConfigError: if the URL is malformed, or obstore is not installed.
    """
    url = StoreUrl.parse(text)
    client = require_client(url)
    from reprise.stores.probe import probe

    return probe(url, client)


def require_client(url: StoreUrl) -> StoreClient:
    """Return a client of the store of a URL, in this process, which must not fork afterwards.

    Raises:
        ConfigError: if obstore is not installed.
    """
    require_extra(url)
    from reprise.stores.client import StoreClient

    return StoreClient(url.root)
