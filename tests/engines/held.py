"""A program of `examples/` that stands still: python -m tests.engines.held NAME ITERATION ARGUMENTS."""

from __future__ import annotations

import builtins
import importlib
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

from tests import ROOT


def stand_still_after(last: int) -> None:
    """Let this process stand still for good when it has printed a line that begins with `last`."""
    show = builtins.print

    def show_and_stop(*values: Any, **options: Any) -> None:
        show(*values, **options)
        if values[:1] == (last,):
            threading.Event().wait()

    builtins.print = show_and_stop


def hold_workers(program: Any, last: int) -> None:
    """Let the workers of Ray Train stand still: it is they who print."""
    work = program.work

    def held_work(config: dict[str, Any]) -> None:
        stand_still_after(last)
        work(config)

    program.work = held_work


def main(name: str, last: int, arguments: list[str]) -> None:
    path = ROOT / "examples" / f"{name}.py"
    sys.argv = [str(path), *arguments]  # which the processes that Fabric launches run, too
    if name == "ray_train":
        program = importlib.import_module(f"examples.{name}")
        hold_workers(program, last)
        program.main(Path(arguments[0]), int(arguments[1]))
    else:
        stand_still_after(last)
        runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
