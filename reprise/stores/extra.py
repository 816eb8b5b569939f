"""The optional package for stores."""

from __future__ import annotations

import importlib.util

from reprise.errors import ConfigError


def require_extra(where: object) -> None:
    """Require the package for stores.

    Raises:
        ConfigError: obstore is not installed.
    """
    if importlib.util.find_spec("obstore") is None:
        raise ConfigError(
            "A package for object stores is missing",
            where=where,
            expected="obstore",
            fix="Install it with: pip install obstore",
        )
