"""The package for stores, which is optional."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from reprise.errors import ConfigError
from reprise.stores.url import StoreUrl

if TYPE_CHECKING:
    from reprise.stores.client import StoreClient


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


def require_client(url: StoreUrl) -> StoreClient:
    """Return a client of the store of a URL, in this process, which must not fork afterwards.

    Raises:
        ConfigError: if obstore is not installed.
    """
    require_extra(url)
    from reprise.stores.client import StoreClient

    return StoreClient(url.root)
