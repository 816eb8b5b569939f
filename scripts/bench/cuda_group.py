"""A group of the battery on a device: sides measured in turn in a single process, within its time."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import SubprocessError

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from models.config import ModelConfig
from reprise.errors import TrainerError
from reprise.layout import TensorKind
from scripts.bench.subject import Subject
from trainer.config.checkpoint import CheckpointSection
from trainer.config.derived import topology_of
from trainer.config.parallel import ParallelSection
from trainer.config.schema import Config
from trainer.config.train import Dtype, TrainSection
from trainer.launch.process_group import Cluster
from trainer.run.parallelize import build_context, build_grid, build_models
from trainer.run.state import TrainerState, build_part
from trainer.training.step import train_step

Figures = dict[str, float]
LEFT_OUT, EAGER = "left out", "not compiled"
# RuntimeError is that of torch's devices and compilers too, such as OutOfMemoryError; CheckpointException of DCP is no
# Exception; Triton calls a C compiler as a process.
_REASONS = (
    RuntimeError,
    OSError,
    MemoryError,
    AssertionError,
    TypeError,
    AttributeError,
    ValueError,
    LookupError,
    ImportError,
    EOFError,
    SubprocessError,
    CheckpointException,
    SafetensorError,
    TrainerError,
)


class Clock:
    """The time left for a battery, or a group of it."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self._end - time.monotonic()


@dataclass(frozen=True, slots=True)
class Setting:
    """A model in training, and how it is measured.

    Args:
        compiles: whether all sides compile; the small sizes, which are for tests, do not.
        steps: iterations of a block between two waits for the device; of `blocks` blocks the median counts.
        following: iterations after a save whose time counts.
    """

    model: ModelConfig
    batch: int
    seq_length: int
    compiles: bool
    steps: int
    blocks: int
    following: int = 10

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_length


@dataclass(frozen=True, slots=True)
class MeasuredSide:
    """A row of a group, and the least seconds with which it is begun."""

    measure: Callable[[], Figures]
    least_s: float


class Device:
    """The measured device, with the same few calls on every kind."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_accelerator = device.type != "cpu"

    def synchronize(self) -> None:
        """Wait for the work of the device."""
        if self.is_accelerator:
            torch.accelerator.synchronize(self.device)

    def reset_peak(self) -> None:
        """Begin to measure the peak of the device's memory anew."""
        if self.is_accelerator:
            torch.accelerator.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> float:
        """Return the most bytes that tensors took since then; 0 on a CPU."""
        return float(torch.accelerator.max_memory_allocated(self.device)) if self.is_accelerator else 0.0

    def free(self) -> None:
        """Return the memory of what is gone, graphs of the compiler included."""
        torch.compiler.reset()
        gc.collect()
        if self.is_accelerator:
            torch.accelerator.empty_cache()
            getattr(torch._C, "_host_emptyCache", lambda: None)()  # pinned memory, which torch keeps otherwise


def measure_sides(
    sides: Mapping[str, MeasuredSide],
    device: Device,
    clock: Clock,
    results: Path,
    *,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Measure the sides in their order, and add a line of JSON for each to `results`.

    A side for which there is no time or no memory, or that fails, is left out with that reason.

    Args:
        notes: entries of every line.
    """
    for name, side in sides.items():
        if clock.left_s < side.least_s:
            reason = f"begins with {side.least_s:.0f} s, {max(0.0, clock.left_s):.0f} s were left"
            _add(results, {"side": name, LEFT_OUT: reason})
            continue
        start = time.monotonic()
        try:
            row: dict[str, object] = {"side": name, **side.measure(), **(notes or {})}
        except _REASONS as error:  # the other sides are measured all the same
            traceback.print_exc()
            row = {"side": name, LEFT_OUT: f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        _add(results, {**row, "took_s": round(time.monotonic() - start, 1)})
        device.free()


def _add(results: Path, row: Mapping[str, object]) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(results: Path) -> list[dict[str, object]]:
    """Return the lines of a file of results, of which the last may be cut off."""
    rows = []
    with suppress(FileNotFoundError, json.JSONDecodeError):
        for line in results.read_text(encoding="utf-8").splitlines():
            rows.append(json.loads(line))
    return rows


def build_training(setting: Setting, cluster: Cluster) -> Subject:
    """Build a state on the device as the trainer does, bfloat16, with values to begin with."""
    train = TrainSection(
        global_batch_size=setting.batch,
        micro_batch_size=setting.batch,
        seq_length=setting.seq_length,
        dtype=Dtype.bfloat16,
        compile=setting.compiles,
    )
    model = setting.model
    config = Config(model, train=train, parallel=ParallelSection(zero_stage=0), checkpoint=CheckpointSection())
    topology = topology_of(config, 1)
    grid = build_grid(topology, None)
    stages = build_models(config, cluster.device, topology=topology, mesh=None)
    file_bytes = config.checkpoint.file_bytes
    parts = [build_part(model, stage, config.optimizer, grid=grid, file_bytes=file_bytes) for stage in stages]
    state = TrainerState(model, parts, grid)
    context = build_context(config, state, topology=topology, mesh=None, cluster=cluster)
    subject = Subject(config, cluster, state, context)
    for tensor in subject.tensors():
        if tensor.spec.kind is TensorKind.MODEL:
            tensor.local.detach().normal_(0.0, 0.02)
    return subject


def step_of(subject: Subject, setting: Setting) -> Callable[[], float]:
    """Return an iteration of the trainer on a batch of random tokens; it returns the loss."""
    windows = random_windows(setting, subject.cluster.device)

    def step() -> float:
        return train_step(
            subject.state,
            [windows],
            keys=[1],
            lr=1e-4,
            clip_grad=1.0,
            context=subject.context,
            cluster=subject.cluster,
        ).loss

    return step


def random_windows(setting: Setting, device: torch.device) -> torch.Tensor:
    """Return tokens, int64 [batch, seq_length + 1], the same ones on every side."""
    generator = torch.Generator().manual_seed(1234)
    shape = (setting.batch, setting.seq_length + 1)
    return torch.randint(setting.model.vocab_size, shape, generator=generator).to(device)
