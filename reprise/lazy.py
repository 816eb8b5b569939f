"""Lazy imports: a module imports its names at their first use, since most programs need few."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def importer(module: str, names: Mapping[str, str], *, root: str = "reprise.") -> Callable[[str], object]:
    """Return a module's `__getattr__` (PEP 562), which imports a name and keeps it in the module.

    Type checkers accept any name on a module with a `__getattr__`. Assign it under `if not TYPE_CHECKING`.

    Args:
        module: The module's full name, `__name__`.
        names: Space-separated names, by the submodule below `root` defining them.
        root: The prefix for submodule names.
    """
    places = {name: f"{root}{place}" for place, members in names.items() for name in members.split()}

    def attribute(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value: object = getattr(import_module(places[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return attribute
