"""The former name of `reprise.errors`, for programs in a checkout; until 0.3."""

import warnings
from typing import Any

from reprise import errors

warnings.warn("trainer.errors is now reprise.errors", DeprecationWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    """Return an error of the library."""
    return getattr(errors, name)
