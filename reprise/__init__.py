"""A checkpoint library: whole logical tensors, written in place by all ranks, committed by one rename.

    from reprise import save, load                          a model and its optimizer
    from reprise import save_state_dict, load_state_dict    a nested state dict, on any group of ranks
    from reprise import AsyncSaver                          both in the background
    from reprise import latest                              the path of the newest checkpoint

It needs nothing of the trainer around it and works on any torch model and optimizer.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reprise.api import load, save
    from reprise.async_saver import AsyncSaver
    from reprise.loading.newest import latest
    from reprise.random_state import RandomState
    from reprise.state_dict import load_state_dict, save_state_dict

__version__ = "0.2.0"

__all__ = ["AsyncSaver", "RandomState", "latest", "load", "load_state_dict", "save", "save_state_dict"]

_MODULES = {
    "AsyncSaver": "async_saver",
    "RandomState": "random_state",
    "latest": "loading.newest",
    "load": "api",
    "load_state_dict": "state_dict",
    "save": "api",
    "save_state_dict": "state_dict",
}


def __getattr__(name: str) -> object:
    """Import a function or class at its first use: the trainer, whose modules lie beneath, needs none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names, also before their first use."""
    return list(__all__)
