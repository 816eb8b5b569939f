"""The former name of `reprise`, the checkpoint library, for programs in a checkout; until 0.3."""

import warnings
from typing import Any

import reprise

warnings.warn("trainer.checkpoint is now reprise: from reprise import ...", DeprecationWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    """Return a public name of the library."""
    return getattr(reprise, name)
