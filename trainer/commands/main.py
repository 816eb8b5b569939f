"""The `reprise` command. Each tool is a subcommand, imported when called."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec

from reprise import __version__
from trainer.config.suggest import closest

_FINE, _NOT_INSTALLED, _WRONG_USE = 0, 1, 2
_UNUSABLE = 2  # as in the subcommands
_INTERRUPTED = 128 + signal.SIGINT  # the exit status that shells use


@dataclass(frozen=True, slots=True)
class Command:
    """A `reprise` subcommand.

    Args:
        module: The module whose `main` runs the subcommand.
        summary: The line in `reprise --help`.
        packages: By name on PyPI, the modules it imports from the optional `train` dependencies.
    """

    module: str
    summary: str
    packages: Mapping[str, str] = field(default_factory=dict)


_COMPOSITION = {"hydra-core": "hydra", "omegaconf": "omegaconf"}
COMMANDS = {
    "train": Command(
        "trainer.__main__", "train a model, or continue a run", {**_COMPOSITION, "tensorboard": "tensorboard"}
    ),
    "options": Command("trainer.commands.options", "describe the keys of the configuration"),
    "doctor": Command(
        "trainer.commands.doctor", "check whether this machine and a folder can train and save, and how fast"
    ),
    "checkpoint": Command("trainer.commands.checkpoint", "list, show, verify, compare, join and delete checkpoints"),
    "convert": Command("trainer.commands.convert", "import and export other programs' checkpoints", _COMPOSITION),
    "evaluate": Command("trainer.commands.evaluate", "print the validation loss of checkpoints", _COMPOSITION),
    "follow": Command(
        "trainer.commands.follow", "evaluate, or run a command on, each checkpoint of a run, while it trains"
    ),
    "generate": Command("trainer.commands.generate", "continue a text with a trained model"),
    "prepare-data": Command("trainer.commands.prepare_data", "make token files from texts", _COMPOSITION),
    "publish": Command(
        "trainer.commands.publish", "send a run's metrics to W&B, SwanLab, MLflow, trackio or TensorBoard", _COMPOSITION
    ),
    "report": Command("trainer.commands.report", "write a report on runs: curves, timeline, goodput, settings"),
    "compare-loss": Command("trainer.commands.compare_loss", "compare the loss curves of runs"),
    "compare-steps": Command(
        "trainer.commands.compare_steps", "find the first tensor that differs between two runs", _COMPOSITION
    ),
    "compare-speed": Command("trainer.commands.compare_speed", "compare how fast runs were and what their saves cost"),
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
    return _FINE


def _call(words: list[str]) -> int:
    match words:
        case [("-h" | "--help"), *_]:
            print(_help())
            return _FINE
        case ["--version", *_]:
            print(f"reprise {__version__}")
            return _FINE
        case [name, *arguments] if name in COMMANDS:
            return _run(name, arguments)
        case []:
            print(_help(), file=sys.stderr)
        case [name, *_]:
            print(f"reprise: {_unknown(name)}", file=sys.stderr)
    return _WRONG_USE


def _run(name: str, arguments: Sequence[str]) -> int:
    missing = " ".join(package for package, module in COMMANDS[name].packages.items() if find_spec(module) is None)
    if missing:
        print(f"reprise {name} needs more packages; install them with: pip install {missing}", file=sys.stderr)
        return _NOT_INSTALLED
    try:
        status: int = import_module(COMMANDS[name].module).main(arguments)
    except KeyboardInterrupt:
        print(f"reprise {name}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"reprise {name}: {error}", file=sys.stderr)
        return _UNUSABLE
    return status


def _unknown(name: str) -> str:
    closest_name = closest(name, COMMANDS)
    hint = f"did you mean {closest_name}?" if closest_name else f"choose from {', '.join(COMMANDS)}"
    return f"unknown command {name!r}; {hint}"


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: reprise COMMAND ...",
            "",
            "Train language models and manage their checkpoints.",
            "",
            "commands:",
            *lines,
            "",
            "`reprise COMMAND --help` describes a command, `reprise --version` prints the version.",
            "Several ranks train with `torchrun --no-python --nproc-per-node N reprise train KEY=VALUE ...`.",
        ]
    )
