"""The `reprise` command. Each tool is a subcommand, imported when called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from reprise import __version__
from trainer.commands.frame import FINE, IMPOSSIBLE, INTERRUPTED, install_command

# Summaries for `reprise --help`.
COMMANDS = {
    "train": "train a model, or continue a run",
    "options": "describe the keys of the configuration",
    "doctor": "check whether this machine and a folder can train and save, and how fast",
    "checkpoint": "list, show, verify, compare, join and delete checkpoints",
    "convert": "import and export other programs' checkpoints",
    "evaluate": "print the validation loss of checkpoints",
    "follow": "evaluate, or run a command on, each checkpoint of a run, while it trains",
    "generate": "continue a text with a trained model",
    "prepare-data": "make token files from texts",
    "publish": "send a run's metrics to W&B, SwanLab, MLflow or trackio",
    "report": "write a report on runs: curves, timeline, goodput, settings",
    "compare-loss": "compare the loss curves of runs",
    "compare-steps": "find the first tensor that differs between two runs",
    "compare-speed": "compare how fast runs were and what their saves cost",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand on the command line, and return the exit status."""
    try:
        try:
            return _call(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the output's reader has exited
        sys.stdout = None
    return FINE


def _call(words: list[str]) -> int:
    name = _parser().parse_args(words[:1]).command
    module = "trainer.__main__" if name == "train" else f"trainer.commands.{name.replace('-', '_')}"
    try:
        status: int = import_module(module).main(words[1:])
    except ModuleNotFoundError as error:
        print(f"reprise {name} needs another package: {install_command(error)}", file=sys.stderr)
        return IMPOSSIBLE
    except KeyboardInterrupt:
        print(f"reprise {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reprise",
        usage="reprise COMMAND ...",
        description="Train language models and manage their checkpoints.",
        epilog="`reprise COMMAND --help` describes a command. Several ranks train with "
        "`torchrun --no-python --nproc-per-node N reprise train KEY=VALUE ...`.",
    )
    parser.add_argument("--version", action="version", version=f"reprise {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser
