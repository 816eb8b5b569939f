"""The former name for `reprise.errors`, for programs in a checkout. To be removed in 0.3."""

import warnings
from typing import Any

from reprise import errors

warnings.warn("trainer.errors is now reprise.errors", DeprecationWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    """Return an error class from the library."""
    return getattr(errors, name)
