"""Troubles that come over a run of the trainer: of the disk, of memory and of data.

They act inside the rank that is named, or in all. Those that begin and end before iterations find no save under way, so
that which save meets them is certain.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trainer.launch.control
import trainer.training.loop
import trainer.training.step
from reprise.storage import Files, iteration_of
from reprise.tensors import local_of, parameter_names
from tests.crash.hosts import run_trainer
from tests.harness import Ended, around_iterations, call_on_ranks
from tests.positions import methods_with
from trainer.data.data_file import Ints
from trainer.run.build import Run
from trainer.run.state import TrainerState
from trainer.saves import targets

DEADLINE_S = 200.0
BALLAST = "ballast"


def train(
    run: Path, overrides: Sequence[str], *troubles: dict[str, Any], ranks: int = 1, logs: Path | None = None
) -> Ended:
    """Run the trainer with troubles, each a `name`, perhaps the `rank` that it comes over, and what it takes besides.

    Args:
        logs: beside it go the outputs, where the disk of the run is the trouble.
    """
    arguments = [json.dumps(troubles), f"run.dir={run}", *overrides]
    return call_on_ranks(main, arguments, folder=logs or run, ranks=ranks)


def main(arguments: list[str]) -> None:
    """Run the trainer's command with the troubles that the first argument describes in JSON."""
    for trouble in json.loads(arguments[0]):
        name, rank = trouble.pop("name"), trouble.pop("rank", None)
        if rank in (None, int(os.environ.get("RANK", "0"))):
            _TROUBLES[name](**trouble)
    run_trainer(arguments[1:])


def fill(folder: Path) -> None:
    """Fill the file system of a folder to its last byte."""
    with (folder / BALLAST).open("wb", buffering=0) as ballast:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    ballast.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


Action = Callable[[Run], object]


def _between(begins: int, ends: int, begin: Action, end: Action) -> None:
    actions = {begins: begin, ends: end}

    def act(run: Run, iteration: int) -> None:
        action = actions.get(iteration)
        if action is not None:
            deadline = time.monotonic() + DEADLINE_S
            while run.saves.is_saving or list(_checkpoints(run).glob(".*.partial")):
                assert time.monotonic() < deadline, "a save does not end, or its partial folder is left"
                os.sched_yield()
            action(run)

    around_iterations(before=act)


def _checkpoints(run: Run) -> Path:
    return Path(str(run.config.checkpoint.save))


def full_disk(begins: int, ends: int, is_unforeseen: bool = False) -> None:
    """Fill the file system to its last byte; with `is_unforeseen` no look at the free space tells of it."""

    def begin(run: Run) -> None:
        if is_unforeseen:
            Files.free_bytes = lambda *_: 1 << 60  # type: ignore[method-assign]
        fill(Path(run.config.run.dir))

    _between(begins, ends, begin, lambda run: (Path(run.config.run.dir) / BALLAST).unlink())


def small_files(begins: int, ends: int, limit: int) -> None:
    """Let no file grow beyond `limit` bytes."""

    def bound(limit: int, _: Run) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    _between(begins, ends, partial(bound, limit), partial(bound, resource.RLIM_INFINITY))


def read_only(begins: int, ends: int) -> None:
    """Lay a read-only view of the checkpoint folder over it."""

    def begin(run: Run) -> None:
        path = str(_checkpoints(run))
        subprocess.run(["mount", "--bind", path, path], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)

    _between(begins, ends, begin, lambda run: subprocess.run(["umount", str(_checkpoints(run))], check=True))


def deleted_folder(begins: int, ends: int) -> None:
    """Delete the checkpoint folder with all in it; make an empty one in the end."""
    _between(begins, ends, lambda run: shutil.rmtree(_checkpoints(run)), lambda run: _checkpoints(run).mkdir())


def failing_call(begins: int, ends: int, kind: str, code: int) -> None:
    """Let every call of one kind that concerns a checkpoint fail with a code."""
    real = getattr(Files, kind)

    def fail(self: Files, *arguments: Any, **keywords: Any) -> Any:
        first = arguments[0]
        path = Path(os.readlink(f"/proc/self/fd/{first}")) if isinstance(first, int) else first
        if any(iteration_of(Path(part.strip(".").split(".")[0])) is not None for part in path.parts):
            raise OSError(code, os.strerror(code), str(path))
        return real(self, *arguments, **keywords)

    _between(begins, ends, lambda _: setattr(Files, kind, fail), lambda _: setattr(Files, kind, real))


def flipped_bit(during: int, tensor: str) -> None:
    """Flip one bit of this rank's copy of a tensor after the optimizer's step of an iteration."""

    def begin(run: Run) -> None:
        def flip(*_: object) -> None:
            hook.remove()
            (found,) = [each for each in run.state.shards() if each.spec.name == tensor]
            found.local.detach().view(torch.int32).view(-1)[-1] ^= 1 << 10  # a later step may round off the lowest

        hook = run.state.parts[-1].optimizer.register_step_post_hook(flip)

    _between(during, during + 1, begin, lambda _: None)


def infinite_gradient(iteration: int, names: list[str], value: float = torch.inf) -> None:
    """Set an element of some gradients to a value in an iteration."""
    compute = trainer.training.step.forward_backward

    def poison(state: TrainerState, *rest: Any) -> list[torch.Tensor]:
        loss = compute(state, *rest)
        if state.progress.iteration + 1 == iteration:
            named = {name: parameter for part in state.parts for parameter, name in parameter_names(part.model).items()}
            for name in names:
                local_of(named[name].grad).view(-1)[0] = value  # type: ignore[arg-type]
        return loss

    trainer.training.step.forward_backward = poison


def bad_data(first: int, end: int) -> None:
    """Make noise of the samples at a range of positions; no save is finished before the run waits for it."""

    def with_noise(windows: Ints, positions: Ints) -> Ints:
        is_bad = (first <= positions) & (positions < end)
        noise = (positions[:, None] * 7919 + np.arange(windows.shape[1]) ** 3 * 104729) % 257
        return np.where(is_bad[:, None], noise, windows)

    checkpointer: Any = vars(targets)["Checkpointer"]
    save, wait, reports = checkpointer.save, checkpointer.wait, checkpointer.reports
    has_waited = False

    def saving(saver: Any, *arguments: Any) -> Any:
        nonlocal has_waited
        report = save(saver, *arguments)
        has_waited = False
        return report

    def waiting(saver: Any) -> None:
        nonlocal has_waited
        wait(saver)
        has_waited = True

    for (owner, name), method in methods_with(with_noise).items():
        setattr(owner, name, method)
    checkpointer.save, checkpointer.wait = saving, waiting
    checkpointer.reports = lambda saver: reports(saver) if has_waited else []


def death(iteration: int, nth: int) -> None:
    """Kill the process after an iteration is trained for the n-th time."""
    numbers = list[int]()

    def die(run: Run, _: int) -> None:
        numbers.append(run.state.progress.iteration)
        if numbers.count(iteration) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    around_iterations(after=die)


def losses(values: Sequence[float]) -> None:
    """Let the evaluation after each iteration find these."""
    trainer.training.loop.evaluate = lambda run: values[run.state.progress.iteration - 1]


_TROUBLES: dict[str, Callable[..., None]] = {
    trouble.__name__.replace("_", " "): trouble
    for trouble in (
        full_disk,
        small_files,
        read_only,
        deleted_folder,
        failing_call,
        flipped_bit,
        infinite_gradient,
        bad_data,
        death,
        losses,
    )
}
