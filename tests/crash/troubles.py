"""Troubles that come over a run of the trainer before chosen iterations, and go: full, failing and missing disks.

They act inside rank 0, or the rank that is named, between two iterations and with no save under way, so that which save
meets them is certain.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import trainer.__main__
from reprise.files import Files
from reprise.folder import iteration_of
from tests.harness import around_iterations
from trainer.run.build import Run

DEADLINE_S = 200.0
BALLAST = "ballast"


def main(arguments: list[str]) -> None:
    """Run the trainer's command with a trouble that begins and ends before iterations.

    Args:
        arguments: the trouble in JSON (`name`, `rank`, `begins`, `ends` and what it takes besides), then overrides.
    """
    trouble, *overrides = arguments
    told = json.loads(trouble)
    if int(os.environ.get("RANK", "0")) == told["rank"]:
        begin, end = TROUBLES[told["name"]](told)
        _act_before({told["begins"]: begin, told["ends"]: end})
    sys.argv = ["trainer", *overrides]
    trainer.__main__.main()


def train(arguments: list[str]) -> None:
    """Run the trainer's command with no trouble but those that are there already."""
    sys.argv = ["trainer", *arguments]
    trainer.__main__.main()


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


def _act_before(actions: dict[int, Callable[[Run], None]]) -> None:
    def act(run: Run, iteration: int) -> None:
        action = actions.get(iteration)
        if action is not None:
            deadline = time.monotonic() + DEADLINE_S
            while run.saves.is_saving or list(checkpoints(run).glob(".*.partial")):
                assert time.monotonic() < deadline, "a save does not end, or its partial folder is left"
                os.sched_yield()
            action(run)

    around_iterations(before=act)


def checkpoints(run: Run) -> Path:
    """Return the folder that a run saves to."""
    assert run.config.checkpoint.save is not None
    return Path(run.config.checkpoint.save)


Actions = tuple[Callable[[Run], None], Callable[[Run], None]]


def full_disk(told: dict[str, Any]) -> Actions:
    """Fill the file system to its last byte; with `is_unforeseen` no look at the free space tells of it."""

    def begin(run: Run) -> None:
        if told["is_unforeseen"]:
            Files.free_bytes = lambda *_: 1 << 60  # type: ignore[method-assign]
        fill(Path(run.config.run.dir))

    return begin, lambda run: (Path(run.config.run.dir) / BALLAST).unlink()


def small_files(told: dict[str, Any]) -> Actions:
    """Let no file grow beyond `limit` bytes."""
    unlimited = resource.RLIM_INFINITY
    return (
        lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (told["limit"], unlimited)),
        lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited)),
    )


def read_only(_: dict[str, Any]) -> Actions:
    """Lay a read-only view of the checkpoint folder over it."""

    def begin(run: Run) -> None:
        path = str(checkpoints(run))
        subprocess.run(["mount", "--bind", path, path], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)

    return begin, lambda run: subprocess.run(["umount", str(checkpoints(run))], check=True) and None


def deleted_folder(_: dict[str, Any]) -> Actions:
    """Delete the checkpoint folder with all in it; make an empty one in the end."""
    return lambda run: shutil.rmtree(checkpoints(run)), lambda run: checkpoints(run).mkdir()


def failing_call(told: dict[str, Any]) -> Actions:
    """Let every call of one `kind` that concerns a checkpoint fail with `code`."""
    kind, real = told["kind"], getattr(Files, told["kind"])

    def fail(self: Files, *arguments: Any, **keywords: Any) -> Any:
        first = arguments[0]
        path = Path(os.readlink(f"/proc/self/fd/{first}")) if isinstance(first, int) else first
        if any(iteration_of(Path(part.strip(".").split(".")[0])) is not None for part in path.parts):
            raise OSError(told["code"], os.strerror(told["code"]), str(path))
        return real(self, *arguments, **keywords)

    return lambda _: setattr(Files, kind, fail), lambda _: setattr(Files, kind, real)


def flipped_bit(told: dict[str, Any]) -> Actions:
    """Flip one bit of this rank's copy of `tensor` after the optimizer's step of the iteration in which it begins."""

    def begin(run: Run) -> None:
        def flip(*_: object) -> None:
            hook.remove()
            (tensor,) = [found for found in run.state.shards() if found.spec.name == told["tensor"]]
            tensor.local.detach().view(torch.int32).view(-1)[-1] ^= 1 << 10  # a later step may round off the lowest

        hook = run.state.parts[-1].optimizer.register_step_post_hook(flip)

    return begin, lambda _: None


TROUBLES: dict[str, Callable[[dict[str, Any]], Actions]] = {
    "full disk": full_disk,
    "small files": small_files,
    "read-only": read_only,
    "deleted folder": deleted_folder,
    "failing call": failing_call,
    "flipped bit": flipped_bit,
}
