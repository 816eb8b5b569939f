"""Ranks that stand still at a chosen moment of training until a test has done something to them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import trainer.__main__
import trainer.build
import trainer.checkpoint.commit
import trainer.evaluate
import trainer.launch
import trainer.loop
import trainer.restore
import trainer.step
from tests.harness import ALL_CORES, Running, started
from trainer.checkpoint.files import Files
from trainer.signals import SignalWatch
from trainer.state import TrainerState

DEADLINE_S = 40.0
MOMENTS = ("build", "load", "forward", "step", "evaluation", "save", "publish", "exit")


@dataclass(frozen=True, slots=True)
class Gate:
    """Where ranks stand still: `folder` holds what they say and what they wait for.

    Args:
        moment: one of MOMENTS; `load` is when a checkpoint is chosen and not yet read, `forward` between two micro
            batches, `save` before a file is synced, `publish` before rank 0 writes the manifest, `exit` where all is
            done but the farewell.
        iteration: the iteration of it, where there are several.
        ranks: who stands still.
    """

    folder: str
    moment: str
    iteration: int
    ranks: tuple[int, ...]

    def stand(self) -> None:
        """Say that this rank is here and wait for the gate to open, the first time only."""
        here = Path(self.folder, f"reached.{os.environ.get('RANK', '0')}")
        if int(os.environ.get("RANK", "0")) in self.ranks and not here.exists():
            here.touch()
            await_true(lambda: Path(self.folder, "open").exists())

    def await_reached(self, ranks: Collection[int] | None = None) -> None:
        """Return once these ranks, or all that are to, stand still."""
        ranks = self.ranks if ranks is None else ranks
        await_true(lambda: all(Path(self.folder, f"reached.{rank}").exists() for rank in ranks))

    def await_heard(self, ranks: Collection[int]) -> None:
        """Return once these ranks have taken a signal."""
        await_true(lambda: all(Path(self.folder, f"heard.{rank}").exists() for rank in ranks))

    def open(self) -> None:
        """Let the ranks go on."""
        Path(self.folder, "open").touch()


def await_true(is_true: Callable[[], bool]) -> None:
    """Look again and again; fail past a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.003)


@contextmanager
def standing(
    folder: Path,
    overrides: Collection[str],
    *,
    moment: str,
    iteration: int = 0,
    ranks: int = 1,
    gated: Collection[int] | None = None,
    gates: Path | None = None,
) -> Iterator[tuple[Running, Gate]]:
    """Start the trainer's command on ranks that all, or the `gated` ones, stand still at a moment.

    Args:
        gates: a new folder for what they say, beside `folder` if not given.
    """
    gates = gates or folder.with_name(f"{folder.name}.gate")
    gates.mkdir(parents=True)
    gate = Gate(str(gates), moment, iteration, tuple(range(ranks) if gated is None else gated))
    arguments = [json.dumps(asdict(gate)), f"run.dir={folder}", *overrides]
    cores = ALL_CORES[:1] if ranks == 1 else ALL_CORES
    with started(train_with_gate, arguments, folder=folder, ranks=ranks, cores=cores) as running:
        yield running, gate


def train_with_gate(arguments: list[str]) -> None:
    """Build the gate that the first argument describes, then run the trainer's command with the others."""
    members = json.loads(arguments[0])
    gate = Gate(**{**members, "ranks": tuple(members["ranks"])})
    heard = SignalWatch.heard

    def say(self: SignalWatch, number: int) -> None:
        heard(self, number)
        Path(gate.folder, f"heard.{os.environ.get('RANK', '0')}").touch()

    SignalWatch.heard = say  # type: ignore[method-assign]
    _GATES[gate.moment](gate)
    sys.argv = ["trainer", *arguments[1:]]
    trainer.__main__.main()


def _before(owner: Any, name: str, stand: Callable[..., None]) -> None:
    """Let `stand` be called with the arguments of `owner.name` before it."""
    call = getattr(owner, name)

    def first(*positional: Any, **named: Any) -> Any:
        stand(*positional, **named)
        return call(*positional, **named)

    setattr(owner, name, first)


def _gate_build(gate: Gate) -> None:
    _before(trainer.build, "build_models", lambda *_, **__: gate.stand())


def _gate_load(gate: Gate) -> None:
    loading = list[bool]()
    _before(trainer.restore, "_load", lambda *_: loading.append(True))
    _before(TrainerState, "shards", lambda *_, **__: _stand_if(gate, bool(loading)))


def _gate_step(gate: Gate) -> None:
    _before(
        trainer.loop,
        "train_step",
        lambda state, *_, **__: _stand_if(gate, state.progress.iteration + 1 == gate.iteration),
    )


def _gate_forward(gate: Gate) -> None:
    at = dict.fromkeys(("iteration", "micro_batch"), 0)

    def count(state: Any, *_: object, **__: object) -> None:
        at.update(iteration=state.progress.iteration + 1, micro_batch=0)

    def stand(*_: object, **__: object) -> None:
        at["micro_batch"] += 1
        _stand_if(gate, at == {"iteration": gate.iteration, "micro_batch": 2})

    _before(trainer.loop, "train_step", count)
    _before(trainer.step, "set_gradient_sync", stand)


def _gate_evaluation(gate: Gate) -> None:
    _before(trainer.evaluate, "_losses", lambda state, *_: _stand_if(gate, state.progress.iteration == gate.iteration))


def _gate_save(gate: Gate) -> None:
    def stand(_: Files, descriptor: int) -> None:
        _stand_if(gate, f".iter_{gate.iteration:07d}." in os.readlink(f"/proc/self/fd/{descriptor}"))

    _before(Files, "sync", stand)


def _gate_publish(gate: Gate) -> None:
    _before(
        trainer.checkpoint.commit,
        "publish",
        lambda attempt, *_, **__: _stand_if(gate, attempt.iteration == gate.iteration),
    )


def _gate_exit(gate: Gate) -> None:
    _before(trainer.launch, "part", lambda *_: gate.stand())


def _stand_if(gate: Gate, is_here: bool) -> None:
    if is_here:
        gate.stand()


_GATES = {
    "build": _gate_build,
    "load": _gate_load,
    "forward": _gate_forward,
    "step": _gate_step,
    "evaluation": _gate_evaluation,
    "save": _gate_save,
    "publish": _gate_publish,
    "exit": _gate_exit,
}


if __name__ == "__main__":
    train_with_gate(sys.argv[1:])
