"""Launches real ranks of the trainer as processes of their own, kills them, and reads what they left.

Ranks are forked from a server that has torch imported; they are told of each other as torchrun tells them.
That server is `preload.py`: a rank starts in a third of a second. Every launch has a deadline.

`run_ok(folder, overrides, ranks=2)` runs the command and fails the test with its output; `launch(..., kill_after=11,
saved=8)` kills all ranks with SIGKILL in the middle of iteration 12, when the save of iteration 8 is committed.
`curve(folder)` and `tensor_files(checkpoint)` are what two runs are compared by: bits of loss, gradient norm and rate,
and bytes of files. `TINY` is a model of odd sizes. `call_on_ranks` calls a function of a test module on ranks, and
`around_iterations` calls one before and after each iteration.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import trainer.__main__
import trainer.config.compose
import trainer.training.loop
from reprise.storage import iteration_name
from scripts.faults.ranks import free_port
from tests.composed import answer_with, composed
from trainer.config.schema import Config
from trainer.launch.process_group import Cluster
from trainer.run.build import Run, build
from trainer.run.inputs import open_inputs
from trainer.saves.targets import build_saves
from trainer.start.decide import decide
from trainer.start.fill import fill
from trainer.training.step import StepResult

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])

ALL_CORES = tuple(sorted(os.sched_getaffinity(0)))

# What has not ended by then hangs, on the slowest machine.
DEADLINE_S = 300.0

# A model small enough for hundreds of runs, of odd sizes: 257 rows, widths that 3 does not divide.
TINY = (
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=20",
    "model.intermediate_size=44",
    "model.max_position_embeddings=32",
    "train.seq_length=16",
    "train.global_batch_size=12",
    "train.micro_batch_size=2",
    "schedule.lr_warmup_iters=3",
    "logging.tensorboard=false",
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a launch ended: exit status and output of each rank; a killed rank's status is -9."""

    statuses: tuple[int, ...]
    outputs: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return all(status == 0 for status in self.statuses)

    @property
    def text(self) -> str:
        return "\n".join(self.outputs)


@dataclass(frozen=True, slots=True)
class _Kill:
    metrics: Path
    iteration: int
    saved: int

    def is_due(self) -> bool:
        recorded = last_iteration(self.metrics) >= self.iteration
        return recorded and last_iteration(self.metrics, "save") >= self.saved


def launch(
    folder: Path,
    overrides: Sequence[str],
    *,
    ranks: int = 1,
    kill_after: int | None = None,
    saved: int = 0,
    cores: Collection[int] | None = None,
    timeout_s: float = DEADLINE_S,
) -> Ended:
    """Run the trainer's command on `ranks` ranks with `run.dir=folder`.

    Args:
        kill_after: kill all ranks with SIGKILL when this iteration is recorded, in the middle of the next one.
        saved: an earlier iteration whose save is committed and recorded before that.
        cores: the cores that each rank may use. None means all for several ranks, and one for a single rank: on models
            of this size its threads would only wait for each other.
        timeout_s: after this the ranks are killed and the test fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["trainer", f"run.dir={folder}", *overrides]
    kill = None if kill_after is None else _Kill(folder / "metrics.jsonl", kill_after, saved)
    function = _train if kill_after is None else partial(_train_until_killed, after=kill_after, awaits_save=saved > 0)
    return _run_ranks(
        function, folder, arguments=arguments, ranks=ranks, kill=kill, cores=_cores(ranks, cores), timeout_s=timeout_s
    )


def call_on_ranks(
    function: Callable[[list[str]], None],
    arguments: Sequence[str],
    *,
    folder: Path,
    ranks: int,
    cores: Collection[int] | None = None,
    timeout_s: float = DEADLINE_S,
) -> Ended:
    """Call `function(arguments)`, a module's own, on `ranks` ranks; their outputs go beside `folder`."""
    own = _cores(ranks, cores)
    return _run_ranks(
        function, folder, arguments=list(arguments), ranks=ranks, kill=None, cores=own, timeout_s=timeout_s
    )


# Which of the processes that run the tests side by side this is.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])


def _cores(ranks: int, cores: Collection[int] | None = None) -> tuple[int, ...]:
    if cores is None:
        return (ALL_CORES[_WORKER % len(ALL_CORES)],) if ranks == 1 else ALL_CORES
    return tuple(cores)


def _run_ranks(
    function: Callable[[list[str]], None],
    folder: Path,
    *,
    arguments: list[str],
    ranks: int,
    kill: _Kill | None,
    cores: tuple[int, ...],
    timeout_s: float,
) -> Ended:
    with started(function, arguments, folder=folder, ranks=ranks, cores=cores) as running:
        _await(running.processes, kill, time.monotonic() + timeout_s)
    return running.ended()


@dataclass(frozen=True, slots=True)
class Running:
    """Ranks that have been started."""

    processes: list[ForkServerProcess]
    outputs: list[Path]

    def send(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        os.kill(self.processes[rank].pid or 0, number)

    def join(self, timeout_s: float, *, but: Collection[int] = ()) -> None:
        """Wait until all ranks, but these, have ended by themselves.

        Raises:
            TimeoutError: if they do not in time.
        """
        deadline = time.monotonic() + timeout_s
        for rank, process in enumerate(self.processes):
            if rank not in but:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.exitcode is None:
                    raise TimeoutError(f"rank {rank} did not end in time:\n{self.outputs[rank].read_text()}")

    def ended(self) -> Ended:
        """Return how it ended, after the end."""
        statuses = tuple(process.exitcode if process.exitcode is not None else -1 for process in self.processes)
        return Ended(statuses, tuple(path.read_text() for path in self.outputs))


@contextmanager
def started(
    function: Callable[[list[str]], None],
    arguments: list[str],
    *,
    folder: Path,
    ranks: int,
    cores: Collection[int] | None = None,
) -> Iterator[Running]:
    """Start ranks that call `function(arguments)`, their outputs beside `folder`, and kill what is left of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    outputs = [folder.with_name(f"{folder.name}.rank{rank}.log") for rank in range(ranks)]
    port, config, cores = free_port(), composed(arguments), _cores(ranks, cores)
    processes = [
        _context.Process(target=_rank, args=(rank, ranks, port, function, arguments, config, str(outputs[rank]), cores))
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        yield Running(processes, outputs)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def run_ok(folder: Path, overrides: Sequence[str], *, ranks: int = 1, cores: Collection[int] | None = None) -> Ended:
    """Run the trainer's command and fail the test, with its output, unless every rank exits 0."""
    ended = launch(folder, overrides, ranks=ranks, cores=cores)
    assert ended.ok, ended.text
    return ended


def checkpoint(run: Path, iteration: int) -> Path:
    """Return the folder of an iteration of a run."""
    return run / "checkpoints" / iteration_name(iteration)


def tensor_files(iteration: Path) -> dict[str, bytes]:
    """Return every safetensors file of a checkpoint by its name in the folder."""
    return {str(p.relative_to(iteration)): p.read_bytes() for p in sorted(iteration.rglob("*.safetensors"))}


def state_of(iteration: Path) -> dict[str, Any]:
    """Return `trainer_state.json` of a checkpoint without the one member by which two runs differ: who they are."""
    state: dict[str, Any] = json.loads((iteration / "trainer_state.json").read_text())
    del state["run"]
    return state


def all_files(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, to prove that nothing changed."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def curve(folder: Path) -> list[tuple[int, str, str, str, int]]:
    """Return the recorded iterations with the bits of loss, gradient norm and rate, and the samples consumed."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (row["iteration"], row["loss_hex"], row["grad_norm_hex"], row["lr_hex"], row["consumed_samples"])
        for row in rows
        if "loss" in row
    ]


def _await(processes: list[ForkServerProcess], kill: _Kill | None, deadline: float) -> None:
    while running := [process.sentinel for process in processes if process.is_alive()]:
        if time.monotonic() > deadline:
            raise TimeoutError("a launch did not end in time")
        if kill is not None and kill.is_due():
            for process in processes:
                os.kill(process.pid or 0, signal.SIGKILL)
            kill = None
        # A rank that fails takes the others down with it, as torchrun does.
        if any(process.exitcode not in (None, 0) for process in processes):
            for process in processes:
                process.join(DEADLINE_S / 5)
                process.kill()
        wait(running, timeout=0.005 if kill is not None else 1.0)


def last_iteration(metrics: Path, event: str | None = None) -> int:
    """Return the last iteration that a metrics file, perhaps just being written, records; 0 if there is none.

    Args:
        event: "save" or "evaluation" for the last of those instead of the last training step.
    """
    if not metrics.exists():
        return 0
    rows = [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return max((int(row["iteration"]) for row in rows if row.get("event") == event), default=0)


def _train(arguments: list[str]) -> None:
    sys.argv = arguments
    trainer.__main__.main()


def _train_until_killed(arguments: list[str], *, after: int, awaits_save: bool) -> None:
    """Train, but let no save be under way when iteration `after` is recorded, and never finish the one after it.

    So the kill comes at the same place however fast the iterations are.
    """

    def await_save(run: Run, iteration: int) -> None:
        while awaits_save and iteration == after and run.saves.is_saving:
            os.sched_yield()

    def hold(run: Run, iteration: int) -> None:
        while iteration > after:
            signal.pause()

    around_iterations(before=await_save, after=hold)
    _train(arguments)


def compose(overrides: Sequence[str], values: Mapping[str, object] | None = None) -> Config:
    """Return the configuration of these overrides over values, which Hydra composes once in a test process."""
    key = (*overrides, repr(values))
    if key not in _COMPOSED:
        _COMPOSED[key] = trainer.config.compose.compose(overrides, values)
    return deepcopy(_COMPOSED[key])


_COMPOSED: dict[tuple[str, ...], Config] = {}


def built(config: Config, cluster: Cluster) -> Run:
    """Return the run of a configuration before its tensors are filled."""
    return build(config, cluster, inputs=open_inputs(config, cluster), saves=build_saves(config, cluster))


def filled(run: Run) -> Run:
    """Return a run that was built, with its tensors filled as its configuration asks for."""
    fill(run, decide(run.config, run.cluster, run.saves))
    return run


def around_iterations(
    before: Callable[[Run, int], None] = lambda *_: None, after: Callable[[Run, int], None] = lambda *_: None
) -> None:
    """Call `before` and `after` with the run and the number of each iteration that this process then trains."""
    iterate = trainer.training.loop.iterate

    def acting(run: Run) -> StepResult:
        iteration = run.state.progress.iteration + 1
        before(run, iteration)
        result = iterate(run)
        after(run, iteration)
        return result

    trainer.training.loop.iterate = acting


def rank_variables(rank: int, ranks: int, *, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun gives a rank of this host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def become_rank(rank: int, ranks: int, *, port: int, output: str) -> None:
    """Make this process rank `rank` of `ranks` on this host, with stdout and stderr at the end of `output`."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if ranks > 1:
        os.environ |= rank_variables(rank, ranks, port=port)


def _rank(
    rank: int,
    ranks: int,
    port: int,
    function: Callable[[list[str]], None],
    arguments: list[str],
    config: DictConfig | None,
    output: str,
    cores: tuple[int, ...],
) -> None:
    Path(output).unlink(missing_ok=True)
    become_rank(rank, ranks, port=port, output=output)
    os.sched_setaffinity(0, cores)
    if config is not None:
        answer_with(config, arguments)
    function(arguments)
