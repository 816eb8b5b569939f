"""The `train` section."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from trainer.config.dtype import Dtype
from trainer.data.position_map import PositionMap, parse_ranges
from trainer.parallel.topology import ACCELERATORS
from trainer.schedules.batch_size import BatchSchedule, parse_batch_schedule
from trainer.schedules.lr import RunLength

AUTO = "auto"
# `checks.validate` replaces this text by a number before other code reads it.
if TYPE_CHECKING:
    _SizeOrAuto: TypeAlias = int
else:
    _SizeOrAuto = int | str


class OnNonfinite(Enum):
    """What happens to an iteration with a nonfinite loss or gradient norm."""

    stop = "stop"
    skip = "skip"


class OnSpike(Enum):
    """What happens to an iteration with a loss or gradient norm far above the running median."""

    off = "off"
    warn = "warn"
    stop = "stop"
    rewind = "rewind"


@dataclass
class TrainSection:
    """The run's length, batches, precision, evaluation and exit.

    Args:
        train_iters: Iterations in the whole run. Unused with `train_samples`.
        train_samples: Samples in the whole run, instead of iterations. The run ends before exceeding them.
        global_batch_size: Samples per iteration, over all ranks and micro-batches.
        batch_schedule: Global batch size by consumed samples. ``0:8 4k:16 16k:32`` has 8 samples per iteration, 16
            after 4,000 consumed samples, then 32. The last must be `global_batch_size`, which evaluations use.
        micro_batch_size: Samples per forward pass on a rank, or `auto`: the size up to `max_micro_batch_size` with the
            fewest samples on the busiest rank.
        max_micro_batch_size: Maximum `micro_batch_size` for `auto`.
        seq_length: Tokens per sample.
        skip_samples: Sample ranges to skip, counted from the run's first sample, as in `["120000-124000"]`, the end
            excluded.
        freeze: Shell patterns matching stored names, as in `["transformer.h.0.*"]`. Those parameters stay unchanged.
        ema_decay: Decay rate for an exponential moving average of the parameters, such as 0.999. The average is also
            saved, loaded and evaluated. 0 disables it.
        clip_grad: Maximum L2 norm for gradients. 0 disables clipping.
        seed: Seed for initial weights, sample order and dropout.
        dtype: Dtype for activations and matrix products. Parameters are float32, moments `optimizer.moments_dtype`.
        compile: Compile each transformer block and, without tensor parallelism, the loss with torch.compile.
        deterministic: Restrict torch to deterministic kernels. CPU kernels always are.
        threads: Compute threads per rank, on which a CPU's bits depend. 0 takes OMP_NUM_THREADS, else a share of the
            cores.
        activation_checkpointing: Recompute transformer blocks in the backward pass.
        eval_interval: Iterations between evaluations. 0 disables them.
        eval_iters: Global batches per evaluation. A smaller validation set repeats, and the log says so.
        exit_interval: Save and exit at the next multiple of this many iterations. 0 disables it.
        exit_duration_in_mins: Save and exit after this many minutes. 0 disables it.
        on_nonfinite: At a nonfinite loss or gradient norm, `stop` ends the run without saving that iteration, `skip`
            omits its step.
        on_spike: At a loss or gradient norm far above its running median, `warn` logs it. `stop` ends the run without
            saving that iteration. `rewind`, also at a nonfinite loss, returns to the newest checkpoint before it and
            skips the samples between.
        spike_factor: Standard deviations above the running median from which a value counts as a spike.
        spike_window: Iterations in the running median. Nothing counts as a spike before this many.
        max_rewinds: Rewinds in a run before a spike stops it.
        distributed_timeout_minutes: Minutes to wait for other ranks before they count as lost.
        device: `cpu`, `cuda` (ROCm too), `xpu`, or `auto`: an accelerator, else the CPU.
        profile_steps: First and last iteration in each rank's torch.profiler trace, as in `[10,13]`.
        dry_run: Train nothing. Print what each of `dry_run_ranks` would hold and write.
        dry_run_ranks: Ranks in a dry run.
    """

    train_iters: int = 100
    train_samples: int | None = None
    global_batch_size: int = 8
    batch_schedule: str | None = None
    micro_batch_size: _SizeOrAuto = 4
    max_micro_batch_size: int = 4
    seq_length: int = 128
    skip_samples: list[str] = field(default_factory=list)
    freeze: list[str] = field(default_factory=list)
    ema_decay: float = 0.0
    clip_grad: float = 1.0
    seed: int = 1234
    dtype: Dtype = Dtype.float32
    compile: bool = False
    deterministic: bool = False
    threads: int = 0
    activation_checkpointing: bool = False
    eval_interval: int = 0
    eval_iters: int = 4
    exit_interval: int = 0
    exit_duration_in_mins: float = 0.0
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    on_spike: OnSpike = OnSpike.off
    spike_factor: float = 6.0
    spike_window: int = 128
    max_rewinds: int = 3
    distributed_timeout_minutes: float = 10.0
    device: str = "auto"
    profile_steps: list[int] = field(default_factory=list)
    dry_run: bool = False
    dry_run_ranks: int = 1

    @property
    def batch_sizes(self) -> BatchSchedule:
        """Return a run's global batch sizes. Raises ValueError for a malformed `batch_schedule`."""
        if self.batch_schedule is None:
            return BatchSchedule(((0, self.global_batch_size),))
        return parse_batch_schedule(self.batch_schedule)

    @property
    def length(self) -> RunLength:
        """Return a run's length, counted from its first sample."""
        sizes = self.batch_sizes
        if self.train_samples is None:
            return RunLength(self.train_iters, sizes.consumed_after(self.train_iters), False, sizes.last)
        return RunLength(sizes.iterations(0, self.train_samples), self.train_samples, True, sizes.last)

    @property
    def position_map(self) -> PositionMap:
        """Return the positions of a run's samples, without the skipped ones. Raises ValueError for malformed ranges."""
        return parse_ranges(self.skip_samples)


def train_problems(train: TrainSection) -> Iterator[str]:
    """List keys with unknown values, or in conflict with other keys."""
    steps = train.profile_steps
    if train.device not in ("auto", "cpu", *ACCELERATORS):
        yield f"train.device={train.device}: must be auto, cpu, {' or '.join(ACCELERATORS)}"
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        yield f"train.profile_steps={steps}: must be empty, or a first and a last iteration as in [10,13]"
    try:
        parse_ranges(train.skip_samples)
    except ValueError as error:
        yield f"train.skip_samples: {error}"
    try:
        if train.batch_schedule is not None:
            parse_batch_schedule(train.batch_schedule)
    except ValueError as error:
        yield f"train.batch_schedule={train.batch_schedule}: {error}"
