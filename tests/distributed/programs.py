"""Programs of several ranks, run one after the other in one launch: a test looks at what each rank has printed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed as dist

from reprise.errors import CheckpointError
from tests.harness import call_on_ranks

# A program gets a folder of its own, and its rank.
Program = Callable[[Path, int], None]


@contextmanager
def process_group() -> Iterator[int]:
    """Join the process group that the environment names; give this rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    yield rank
    dist.barrier()
    dist.destroy_process_group()


def refused(call: Callable[[], object], kind: type[BaseException] = CheckpointError) -> None:
    """Print what the call is refused with, on one line."""
    with pytest.raises(kind) as caught:
        call()
    print(f"[{type(caught.value).__name__}] {' '.join(str(caught.value).splitlines())}", flush=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The folder of a program, and what each rank has printed."""

    folder: Path
    outputs: tuple[str, ...]

    @property
    def committed(self) -> list[str]:
        """Return the names of the checkpoints, and of all other folders."""
        return sorted(path.name for path in self.folder.glob("*") if path.is_dir())

    @property
    def text(self) -> str:
        return "\n".join(self.outputs)

    def refusals(self) -> list[list[str]]:
        """Return what calls were refused with, for each rank."""
        return [[line for line in output.splitlines() if line.startswith("[")] for output in self.outputs]


def run_programs(programs: Sequence[Program], folder: Path, *, ranks: int = 2) -> dict[str, Outcome]:
    """Run programs of a module on ranks, and return what became of each, by its name."""
    names = [program.__name__ for program in programs]
    arguments = [programs[0].__module__, str(folder), *names]
    ended = call_on_ranks(_run_each, arguments, folder=folder / "ranks", ranks=ranks, timeout_s=60.0 + 20 * len(names))
    assert ended.ok, ended.text
    parts = [output.split("== ")[1:] for output in ended.outputs]
    return {
        name: Outcome(folder / name, tuple(part[number].partition("\n")[2] for part in parts))
        for number, name in enumerate(names)
    }


def _run_each(arguments: list[str]) -> None:
    module, folder, *names = arguments
    with process_group() as rank:
        for name in names:
            print(f"== {name}", flush=True)
            getattr(import_module(module), name)(Path(folder, name), rank)
            dist.barrier()
