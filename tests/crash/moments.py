"""Ranks that stand still, are killed or hang at a chosen moment of a run.

`python -m tests.crash.moments GATES OVERRIDE...` is the trainer's command with gates.

A `Gate` holds, stops or kills ranks at a named moment: before the store is met, between two micro batches, before the
manifest is written. The test waits until they stand there, sends its signal or kill, and opens the gate.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import reprise.commit.finish
import trainer.launch.process_group
import trainer.run.build
import trainer.run.inputs
import trainer.training.loop
import trainer.training.step
from reprise.loading import Checkpoint
from reprise.local.link import Link
from reprise.storage import Files
from tests.crash.hosts import run_trainer
from tests.harness import Running, started
from tests.positions import methods_with
from trainer.data.data_file import Ints
from trainer.data.loader import BatchLoader
from trainer.launch.signals import SignalHandler
from trainer.parallel.invariant import LocalLanes, ShardedLanes
from trainer.parallel.pipeline import Pipeline
from trainer.parallel.reduction import MeanReduction
from trainer.run.state import TrainerState
from trainer.start.source import Checkpoints

DEADLINE_S = 240.0  # what has not happened by then hangs, on the slowest machine
WAIT, KILLED, STOPPED = "wait", "killed", "stopped"


@dataclass(frozen=True, slots=True)
class Gate:
    """Where ranks stand still: `folder` holds what they say and what they wait for.

    Args:
        moment: a key of _GATES; `meet` is when the store is there and nobody has been met, `group` before the process
            group, `data` before the data are prepared, `load` when a checkpoint is chosen and not yet read, `forward`
            between two micro batches (in a pipeline, before the first), `save` before a file is synced, `prepare`
            before rank 0 writes the manifest, `link` before a host opens its links to another for the first time,
            `copy` before it sends or receives a copy on them, `exit` before the last barrier, `destroy` after it,
            before the process group is destroyed. At `feed` nobody stands still: which samples a rank is fed is noted
            in `fed.PID`.
        iteration: the iteration of it, where there are several.
        ranks: who stands still.
        deed: what the ranks do there: WAIT, or be KILLED or STOPPED by a signal of their own.
    """

    folder: str
    moment: str
    iteration: int
    ranks: tuple[int, ...]
    deed: str = WAIT

    @classmethod
    def at(cls, folder: Path, moment: str, iteration: int, ranks: Collection[int], deed: str = WAIT) -> Gate:
        """Return a gate with a new folder."""
        folder.mkdir(parents=True)
        return cls(str(folder), moment, iteration, tuple(ranks), deed)

    def stand(self) -> None:
        """Say that this rank is here and do the deed, the first time only."""
        here = Path(self.folder, f"reached.{os.environ.get('RANK', '0')}")
        if int(os.environ.get("RANK", "0")) in self.ranks and not here.exists():
            here.touch()
            if self.deed == WAIT:
                await_true(lambda: Path(self.folder, "open").exists())
            else:
                os.kill(os.getpid(), signal.SIGKILL if self.deed == KILLED else signal.SIGSTOP)

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
    deed: str = WAIT,
) -> Iterator[tuple[Running, Gate]]:
    """Start the trainer's command on ranks that all, or the `gated` ones, stand still or are lost at a moment.

    Args:
        gates: a new folder for what they say, beside `folder` if not given.
    """
    gates = gates or folder.with_name(f"{folder.name}.gate")
    gate = Gate.at(gates, moment, iteration, range(ranks) if gated is None else gated, deed)
    arguments = [describe([gate]), f"run.dir={folder}", *overrides]
    with started(train_with_gate, arguments, folder=folder, ranks=ranks) as running:
        yield running, gate


def describe(gates: Collection[Gate]) -> str:
    """Return gates as an argument of the command."""
    return json.dumps([asdict(gate) for gate in gates])


def train_with_gate(arguments: list[str]) -> None:
    """Build the gates that the first argument describes, then run the trainer's command with the others."""
    for members in json.loads(arguments[0]):
        _build(Gate(**{**members, "ranks": tuple(members["ranks"])}))
    run_trainer(arguments[1:])


def _build(gate: Gate) -> None:
    heard = SignalHandler.receive

    def say(self: SignalHandler, number: int) -> None:
        heard(self, number)
        Path(gate.folder, f"heard.{os.environ.get('RANK', '0')}").touch()

    SignalHandler.receive = say  # type: ignore[method-assign]
    _GATES[gate.moment](gate)


def _before(owner: Any, name: str, stand: Callable[..., None]) -> None:
    """Let `stand` be called with the arguments of `owner.name` before it."""
    call = getattr(owner, name)

    def first(*positional: Any, **named: Any) -> Any:
        stand(*positional, **named)
        return call(*positional, **named)

    setattr(owner, name, first)


def _once_before(owner: Any, name: str) -> Callable[[Gate], None]:
    """Return how a gate is built before the only call of a function."""
    return lambda gate: _before(owner, name, lambda *_, **__: gate.stand())


def _gate_load(gate: Gate) -> None:
    loading = list[bool]()
    _before(Checkpoints, "fill", lambda *_: loading.append(True))
    _before(TrainerState, "shards", lambda *_, **__: _stand_if(gate, bool(loading)))


def _gate_step(gate: Gate) -> None:
    _before(
        trainer.training.loop,
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

    def stand_first(*_: object, **__: object) -> None:
        _stand_if(gate, at["iteration"] == gate.iteration)

    _before(trainer.training.loop, "train_step", count)
    for reduction in (MeanReduction, LocalLanes, ShardedLanes):
        _before(reduction, "before_backward", stand)
    _before(Pipeline, "forward_backward", stand_first)


def _gate_evaluation(gate: Gate) -> None:
    _before(
        trainer.training.loop,
        "evaluate",
        lambda run: _stand_if(gate, run.state.progress.iteration == gate.iteration),
    )


def _gate_save(gate: Gate) -> None:
    def stand(_: Files, descriptor: int) -> None:
        _stand_if(gate, f".iter_{gate.iteration:07d}." in os.readlink(f"/proc/self/fd/{descriptor}"))

    _before(Files, "sync", stand)


def _gate_prepare(gate: Gate) -> None:
    _before(
        reprise.commit.finish,
        "prepare",
        lambda attempt, *_, **__: _stand_if(gate, attempt.iteration == gate.iteration),
    )


def _gate_link(gate: Gate) -> None:
    _before(Link, "__init__", lambda *_, **__: gate.stand())


def _gate_copy(gate: Gate) -> None:
    def stand(_: Link, *arguments: object) -> None:
        (checkpoint,) = [found for found in arguments if isinstance(found, Checkpoint)]
        _stand_if(gate, checkpoint.iteration == gate.iteration)

    _before(Link, "send", stand)
    _before(Link, "receive", stand)


def _note_feed(gate: Gate) -> None:
    """Note in a file of this process which samples it is fed."""
    train_batch, positions = BatchLoader.train_batch, list[int]()

    def note(windows: Ints, read: Ints) -> Ints:
        positions.extend(read.tolist())
        return windows

    def feed(self: BatchLoader, consumed_samples: int, seed: int, size: int) -> list[torch.Tensor]:
        positions.clear()
        windows = train_batch(self, consumed_samples, seed, size)
        row = {
            "iteration": consumed_samples // self.global_batch_size + 1,
            "world_size": int(os.environ["WORLD_SIZE"]),
            "positions": positions,
        }
        with Path(gate.folder, f"fed.{os.getpid()}").open("a") as file:
            file.write(json.dumps(row) + "\n")
        return windows

    for (owner, name), method in methods_with(note).items():
        setattr(owner, name, method)
    BatchLoader.train_batch = feed  # type: ignore[method-assign]


def _stand_if(gate: Gate, is_here: bool) -> None:
    if is_here:
        gate.stand()


_GATES = {
    "meet": _once_before(trainer.launch.process_group, "rendezvous"),
    "group": _once_before(torch.distributed, "init_process_group"),
    "data": _once_before(trainer.run.inputs, "open_data"),
    "build": _once_before(trainer.run.build, "build_models"),
    "load": _gate_load,
    "forward": _gate_forward,
    "step": _gate_step,
    "evaluation": _gate_evaluation,
    "save": _gate_save,
    "prepare": _gate_prepare,
    "link": _gate_link,
    "copy": _gate_copy,
    "exit": _once_before(trainer.launch.process_group, "final_barrier"),
    "destroy": _once_before(trainer.launch.process_group, "destroy"),
    "feed": _note_feed,
}


if __name__ == "__main__":
    train_with_gate(sys.argv[1:])
