"""The frame around a subcommand: it parses the command line, logs to stderr, and reports an error there."""

from __future__ import annotations

import io
import logging
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from reprise.errors import TrainerError

# Exit statuses: all is well; a finding, such as a difference; the command failed; as shells have it.
FINE, BAD, IMPOSSIBLE, INTERRUPTED = 0, 1, 2, 128 + signal.SIGINT

_PACKAGES = {"hydra": "hydra-core"}  # names on PyPI, where they differ from the module's
Main = Callable[[Sequence[str]], int]


def framed(
    call: Callable[[Namespace], int],
    add_arguments: Callable[[ArgumentParser], object],
    *,
    parse: Callable[[ArgumentParser, Sequence[str]], Namespace] = ArgumentParser.parse_args,
    form: str = "",
) -> Main:
    """Return a subcommand's `main`: it parses the arguments, and returns the exit status from `call`.

    The module of `call` gives the subcommand its name. Its docstring's first paragraph is the help's first text,
    the others are the last.

    Args:
        form: The format of log lines. By default, they follow the command's name.
    """

    def main(arguments: Sequence[str]) -> int:
        name = f"reprise {call.__module__.rpartition('.')[2].replace('_', '-')}"
        texts = (sys.modules[call.__module__].__doc__ or "").partition("\n\n")
        parser = ArgumentParser(prog=name, description=texts[0], epilog=texts[2])
        add_arguments(parser)
        logging.basicConfig(format=form or f"{name}: %(message)s", stream=sys.stderr)
        if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack a text's characters
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return call(parse(parser, arguments))
        except TrainerError as error:
            problem = str(error)
        except OSError as error:
            if isinstance(error, BrokenPipeError):  # the output's reader has exited
                raise
            problem = ": ".join(str(part) for part in (error.filename, error.strerror) if part is not None)
        print(f"{name}: {problem}", file=sys.stderr)
        return IMPOSSIBLE

    return main


def add_command(
    add_parser: Callable[..., ArgumentParser], name: str, call: Callable[[Namespace], int]
) -> ArgumentParser:
    """Add a command below a subcommand. The docstring of `call` is its help."""
    parser = add_parser(name, help=(call.__doc__ or "").rstrip("."), description=call.__doc__)
    parser.set_defaults(call=call)
    return parser


def install_command(error: ModuleNotFoundError) -> str:
    """Return the command that installs a missing module's package."""
    module = str(error.name).partition(".")[0]
    return f"pip install {_PACKAGES.get(module, module)}"
