"""The section `train` with the ranges of its keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from trainer.config.values import MOST_SECONDS
from trainer.parallel.topology import ACCELERATORS, MOST_THREADS

_MOST_MINUTES = 1e7
_MOST_WINDOW = 10_000  # values in every checkpoint
_MOST_RANKS = 1 << 20  # of a dry run's table

AUTO = "auto"
# The text gives way to a number before anything but `checks.with_micro_batch` reads it.
if TYPE_CHECKING:
    _SizeOrAuto: TypeAlias = int
else:
    _SizeOrAuto = int | str


class OnNonfinite(Enum):
    """What becomes of an iteration whose loss or gradient norm is no finite number."""

    stop = "stop"
    skip = "skip"


class OnSpike(Enum):
    """What becomes of an iteration whose loss or gradient norm is far above the running median."""

    off = "off"
    warn = "warn"
    stop = "stop"
    rewind = "rewind"


class Dtype(Enum):
    """The dtype of activations and matrix products; parameters are float32 either way."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class TrainSection:
    """Length, batches, precision, evaluation and exit of a run.

    Args:
        train_iters: iterations of the whole run; unused with `train_samples`.
        train_samples: samples of the whole run instead; it ends before exceeding them.
        global_batch_size: samples per iteration, over all ranks and micro-batches.
        batch_schedule: global batch by consumed samples: ``0:8 4k:16 16k:32`` has 8 samples per iteration, 16 after
            4,000 consumed samples, then 32. The last must be `global_batch_size`, which evaluations use.
        micro_batch_size: samples per forward pass of a rank, or `auto`: the size up to `max_micro_batch_size` with the
            fewest samples on the busiest rank.
        max_micro_batch_size: largest `micro_batch_size` of `auto`.
        seq_length: tokens per sample.
        skip_samples: ranges of samples to pass over, counted from the run's first, as in `["120000-124000"]`, the end
            excluded.
        freeze: shell patterns of stored names, as in `["transformer.h.0.*"]`, of parameters that stay unchanged.
        ema_decay: share of an exponential moving average of the parameters kept by a step, such as 0.999; also saved,
            loaded and evaluated. 0 keeps none.
        ema_offload: keep the averages in host memory, with the same bits.
        clip_grad: upper bound of the gradient's L2 norm; 0 disables it.
        seed: seed of initial weights, order of samples and dropout.
        dtype: dtype of activations and matrix products; parameters are float32, moments `optimizer.moments_dtype`.
        compile: compile each transformer block and, without tensor parallelism, the loss with torch.compile.
        deterministic: restrict torch to deterministic kernels; a CPU's always are.
        threads: compute threads of a rank, on which a CPU's bits depend; 0 takes OMP_NUM_THREADS, else a share of
            cores.
        activation_checkpointing: recompute transformer blocks in the backward pass.
        eval_interval: iterations between evaluations; 0 never.
        eval_iters: global batches per evaluation; a smaller validation set repeats, which the log says.
        sample_interval: iterations between sampled texts; 0 never.
        sample_prompt: beginning of a sampled text; empty begins a document.
        sample_tokens: most tokens beyond the prompt; in a pipeline each costs an iteration.
        exit_interval: save and exit at the next multiple of so many iterations; 0 never.
        exit_duration_in_mins: save and exit after so many minutes; 0 never.
        exit_signal_save_seconds: seconds to save and exit after SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGXCPU or SIGHUP on
            any rank, else the status is 1. torchrun kills 30 s after SIGTERM.
        on_nonfinite: at a nonfinite loss or gradient norm, `stop` ends the run without saving that iteration, `skip`
            omits its step.
        on_spike: at a loss or gradient norm far above its running median, `warn` logs it; `stop` ends the run without
            saving that iteration; `rewind`, also at a nonfinite loss, returns to the newest checkpoint before it and
            skips the samples between.
        spike_factor: standard deviations of a spike above the running median.
        spike_window: iterations of the running median; none is a spike before so many.
        max_rewinds: rewinds of a run before a spike stops it.
        check_replicas_interval: iterations between the comparisons of `checkpoint.check_replicas` beside saves; 0
            never.
        distributed_timeout_minutes: minutes that a rank waits for others before it counts them as lost.
        device: `cpu`, `cuda` (ROCm too), `xpu`, or `auto`: an accelerator, else the CPU.
        profile_steps: first and last iteration of each rank's torch.profiler trace, as in `[10,13]`.
        dry_run: train nothing; print what each of `dry_run_ranks` would hold and write.
        dry_run_ranks: ranks of a dry run.
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
    ema_offload: bool = False
    clip_grad: float = 1.0
    seed: int = 1234
    dtype: Dtype = Dtype.float32
    compile: bool = False
    deterministic: bool = False
    threads: int = 0
    activation_checkpointing: bool = False
    eval_interval: int = 0
    eval_iters: int = 4
    sample_interval: int = 0
    sample_prompt: str = ""
    sample_tokens: int = 64
    exit_interval: int = 0
    exit_duration_in_mins: float = 0.0
    exit_signal_save_seconds: float = 25.0
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    on_spike: OnSpike = OnSpike.off
    spike_factor: float = 6.0
    spike_window: int = 128
    max_rewinds: int = 3
    check_replicas_interval: int = 0
    distributed_timeout_minutes: float = 10.0
    device: str = "auto"
    profile_steps: list[int] = field(default_factory=list)
    dry_run: bool = False
    dry_run_ranks: int = 1


def train_problems(train: TrainSection) -> list[str]:
    """Return every key of the section outside its range."""
    problems = [
        f"train.{name}={getattr(train, name)}: must be at least 1" for name in _COUNTS if getattr(train, name) < 1
    ]
    problems += [
        f"train.{name}={getattr(train, name)}: must be 0 (never) or more"
        for name in _INTERVALS
        if getattr(train, name) < 0
    ]
    if train.clip_grad < 0:
        problems.append(f"train.clip_grad={train.clip_grad}: must be 0 (no clipping) or more")
    for name, most in (("exit_signal_save_seconds", MOST_SECONDS), ("distributed_timeout_minutes", _MOST_MINUTES)):
        if not 0 < getattr(train, name) <= most:
            problems.append(f"train.{name}={getattr(train, name)}: must be above 0 and at most {most:g}")
    if not 0 <= train.ema_decay < 1:
        problems.append(f"train.ema_decay={train.ema_decay}: must be 0 (no average) or more, and below 1")
    if train.ema_offload and not train.ema_decay:
        problems.append("train.ema_offload=true: needs train.ema_decay above 0, or train.ema_offload=false")
    if train.spike_factor <= 0:
        problems.append(f"train.spike_factor={train.spike_factor}: must be above 0")
    if not 2 <= train.spike_window <= _MOST_WINDOW:
        problems.append(f"train.spike_window={train.spike_window}: must be from 2 to {_MOST_WINDOW}")
    if train.seed < 0:
        problems.append(f"train.seed={train.seed}: must be 0 or more")
    if not 0 <= train.threads <= MOST_THREADS:
        problems.append(
            f"train.threads={train.threads}: must be 0 (a share of the cores) or more, at most {MOST_THREADS}"
        )
    if train.dry_run_ranks > _MOST_RANKS:
        problems.append(f"train.dry_run_ranks={train.dry_run_ranks}: must be at most {_MOST_RANKS}")
    if train.device not in ("auto", "cpu", *ACCELERATORS):
        problems.append(f"train.device={train.device}: must be auto, cpu, {' or '.join(ACCELERATORS)}")
    steps = train.profile_steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        problems.append(f"train.profile_steps={steps}: must be empty, or a first and a last iteration as in [10,13]")
    return problems


_COUNTS = (
    "train_iters",
    "global_batch_size",
    "micro_batch_size",
    "max_micro_batch_size",
    "seq_length",
    "eval_iters",
    "sample_tokens",
    "max_rewinds",
    "dry_run_ranks",
)
_INTERVALS = (
    "eval_interval",
    "sample_interval",
    "exit_interval",
    "exit_duration_in_mins",
    "check_replicas_interval",
)
