"""Names of a module that it imports at their first use: of many parts, most programs need few."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def importer(module: str, names: Mapping[str, str], *, root: str = "reprise.") -> Callable[[str], object]:
    """Return the `__getattr__` of a module (PEP 562), which imports a name and keeps it in the module.

    A type checker would take any name for one of a module with a `__getattr__`: assign it under `if not TYPE_CHECKING`.

    Args:
        module: its full name, `__name__`.
        names: those of each module, separated by spaces, by its name below `root`.
        root: of the names of modules.
    """
    places = {name: f"{root}{place}" for place, members in names.items() for name in members.split()}

    def attribute(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value: object = getattr(import_module(places[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return attribute
