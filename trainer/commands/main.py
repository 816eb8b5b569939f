"""The command `reprise`: each tool is a subcommand, imported when it is called."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, metadata

from trainer.config.suggest import closest

_FINE, _WRONG_USE = 0, 2
_INTERRUPTED = 128 + signal.SIGINT  # the status that shells give


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: the module whose `main` runs it, and its line in `reprise --help`."""

    module: str
    summary: str


COMMANDS = {
    "train": Command("trainer.__main__", "train a model, or continue a run"),
    "options": Command("trainer.commands.options", "describe the keys of the configuration"),
    "doctor": Command(
        "trainer.commands.doctor", "check whether this machine and a folder can train and save, and how fast"
    ),
    "checkpoint": Command("trainer.commands.checkpoint", "list, show, verify, compare, join and delete checkpoints"),
    "convert": Command("trainer.commands.convert", "import and export the checkpoints of other programs"),
    "generate": Command("trainer.commands.generate", "continue a text with a trained model"),
    "prepare-data": Command("trainer.commands.prepare_data", "make token files from texts"),
    "compare-loss": Command("trainer.commands.compare_loss", "compare the loss curves of runs"),
    "compare-speed": Command(
        "trainer.commands.compare_speed", "compare the speed of runs, and the cost of their saves"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the command line names, and return the exit status."""
    match list(sys.argv[1:] if arguments is None else arguments):
        case [("-h" | "--help"), *_]:
            print(_help())
            return _FINE
        case ["--version", *_]:
            print(f"reprise {metadata.version('reprise')}")
            return _FINE
        case [name, *rest] if name in COMMANDS:
            return _run(name, rest)
        case []:
            print(_help(), file=sys.stderr)
        case [name, *_]:
            print(f"reprise: {_unknown(name)}", file=sys.stderr)
    return _WRONG_USE


def _run(name: str, arguments: Sequence[str]) -> int:
    try:
        tool = import_module(COMMANDS[name].module)
        status: int = tool.main(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has seen enough
        sys.stdout = None
        return _FINE
    except KeyboardInterrupt:
        print(f"reprise {name}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status


def _unknown(name: str) -> str:
    near = closest(name, COMMANDS)
    hint = f"did you mean {near}?" if near else f"choose from {', '.join(COMMANDS)}"
    return f"unknown command {name!r}; {hint}"


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: reprise COMMAND ...",
            "",
            "Train language models, and look after their checkpoints.",
            "",
            "commands:",
            *lines,
            "",
            "`reprise COMMAND --help` describes a command, `reprise --version` prints the version.",
            "Several ranks train with `torchrun --nproc-per-node N -m trainer KEY=VALUE ...`.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
