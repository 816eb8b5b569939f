"""The package for stores, which is optional."""

from __future__ import annotations

import importlib.util

from reprise.errors import ConfigError


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
