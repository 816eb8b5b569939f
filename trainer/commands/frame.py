"""The frame around a subcommand: it parses the command line, logs to stderr, and reports an error there."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence

from reprise.errors import TrainerError

# Exit statuses: all is well; a finding, such as a difference; the command failed; as shells have it.
FINE, BAD, IMPOSSIBLE, INTERRUPTED = 0, 1, 2, 128 + signal.SIGINT

_PACKAGES = {"hydra": "hydra-core"}  # names on PyPI, where they differ from the module's
Main = Callable[[Sequence[str] | None], int]


def framed(
    parser: Callable[[], argparse.ArgumentParser], call: Callable[[argparse.Namespace], int], *, form: str = ""
) -> Main:
    """Return a subcommand's `main`: it parses the arguments, and returns the exit status from `call`.

    Args:
        form: The format of log lines, if another than `reporting` uses.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        parsing = parser()
        return reporting(parsing.prog, lambda: call(parsing.parse_args(arguments)), form=form)

    return main


def reporting(name: str, call: Callable[[], int], *, form: str = "") -> int:
    """Return a call's exit status. Print its error, and its log lines, under the command's name."""
    logging.basicConfig(format=form or f"{name}: %(message)s", stream=sys.stderr)
    try:
        return call()
    except TrainerError as error:
        problem = str(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the output's reader has exited
            raise
        problem = ": ".join(str(part) for part in (error.filename, error.strerror) if part is not None)
    print(f"{name}: {problem}", file=sys.stderr)
    return IMPOSSIBLE


def install_command(error: ModuleNotFoundError) -> str:
    """Return the command that installs a missing module's package."""
    module = str(error.name).partition(".")[0]
    return f"pip install {_PACKAGES.get(module, module)}"
