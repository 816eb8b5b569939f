"""The `checkpoint` section, grouped by use. The keys themselves are flat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from trainer.config.dtype import Dtype


class Allowed(Enum):
    """Differences from the saved run, each allowed by a flag in `ResumeKeys`. `all` stands for every difference."""

    batch = "batch"
    data = "data"
    dropout = "dropout"
    dtype = "dtype"
    freeze = "freeze"
    lr = "lr"
    topology = "topology"
    all = "all"


# The key in `checkpoint` equivalent to each `checkpoint.allow` value.
FLAGS = {
    Allowed.batch: "override_batch_size",
    Allowed.data: "override_data",
    Allowed.dropout: "override_dropout",
    Allowed.dtype: "override_dtype",
    Allowed.freeze: "override_freeze",
    Allowed.lr: "override_scheduler",
    Allowed.topology: "reshard",
}


@dataclass
class SaveKeys:
    """When and where a run saves, and which checkpoints it keeps.

    Args:
        save: The run's checkpoint folder. null saves nothing.
        save_interval: Iterations between saves. 0 saves only at the end.
        save_interval_mins: Maximum minutes between saves. 0 sets no limit.
        max_checkpoint_keep: Newest checkpoints to keep. 0 keeps all. Without `finetune`, retention never deletes a
            checkpoint named by `ckpt_step`, or by a path in `load`, while that command trains. A checkpoint found by
            `auto` is not exempt.
        keep_best: Checkpoints with the lowest validation loss to keep as well. Needs `train.eval_interval` and
            `max_checkpoint_keep`.
        save_retain_interval: Keep checkpoints at multiples of this many iterations. 0 exempts none.
        full_steps: Iterations to save and keep as well, always with optimizer state, such as ``[1000,5000]``.
        no_save_optim: Save only the weights.
    """

    save: str | None = "${run.dir}/checkpoints"
    save_interval: int = 20
    save_interval_mins: float = 0.0
    max_checkpoint_keep: int = 0
    keep_best: int = 0
    save_retain_interval: int = 0
    full_steps: list[int] = field(default_factory=list)
    no_save_optim: bool = False


@dataclass
class WeightsKeys:
    """Weights-only saves.

    Args:
        save_weights_interval: Iterations between weights-only saves, into ``weights`` under `save`. 0 disables them.
        save_steps: Iterations with another weights-only save, such as ``[0,1,2,4]``. 0 is the start.
        weights_dtype: Dtype for weights-only saves.
        weights_keep: Newest weights-only saves to keep, beside `save_steps`. 0 keeps all.
    """

    save_weights_interval: int = 0
    save_steps: list[int] = field(default_factory=list)
    weights_dtype: Dtype = Dtype.bfloat16
    weights_keep: int = 0


@dataclass
class MirrorKeys:
    """The mirror of a run's checkpoints in an object store.

    Args:
        mirror: Store URL, such as ``s3://bucket/run``, to which rank 0's host uploads `save`, with weights and
            adapters. null disables the mirror.
        mirror_keep: Newest checkpoints to keep in the store. 0 keeps all.
        mirror_interval: Mirror checkpoints at multiples of n save intervals, and the run's last checkpoint.
        mirror_wait_s: Maximum seconds to wait for the mirror at the run's end. A tenth after a signal.
    """

    mirror: str | None = None
    mirror_keep: int = 0
    mirror_interval: int = 1
    mirror_wait_s: float = 60.0


@dataclass
class LoadKeys:
    """The checkpoint from which a run starts.

    Args:
        load: `auto` continues from the run's newest valid checkpoint, and starts fresh only if the run has none and
            recorded no save. `none` starts fresh. A path or URL names a run, its checkpoint folder, an iteration or,
            with `finetune`, a transformers folder or llm.c weight file. `none` and paths act once: restarts continue
            from the run's own checkpoints. Without ``model=`` and ``experiment=``, a checkpoint path also supplies the
            configuration, and a transformers folder the model.
        ckpt_step: Iteration to load, once, instead of the newest.
        no_load_optim: Load only the weights, and continue at the saved iteration.
    """

    load: str = "auto"
    ckpt_step: int | None = None
    no_load_optim: bool = False


@dataclass
class FinetuneKeys:
    """How another run's weights are used.

    Args:
        finetune: Load only the weights, and start at iteration 0.
        base: Frozen weights beneath `model.lora`: a path as in `load`. null takes `load`, with `finetune`. A resume
            needs the same weights.
        resize: With `finetune`, allow another `model.vocab_size` or `model.max_position_embeddings`. Rows keep their
            numbers, and new ones are initialized as in a fresh run.
    """

    finetune: bool = False
    base: str | None = None
    resize: bool = False


@dataclass
class ResumeKeys:
    """Differences from the saved run allowed by a resume.

    Args:
        allow: Differences to allow, such as ``lr,batch,dtype``. Each stands for the flag below, `topology` for
            `reshard` and `lr` for `override_scheduler`. `all` allows every difference, and logs the ones found.
        reshard: Allow another topology (ranks, parallel sizes, ZeRO stage) or micro_batch_size.
        override_scheduler: Allow another schedule, other optimizer settings or clip_grad.
        use_checkpoint_scheduler: Take the schedule and optimizer settings from the checkpoint.
        override_batch_size: Allow another global_batch_size, batch_schedule or seq_length.
        override_data: Allow other data or another seed.
        override_dropout: Allow other dropout rates.
        override_dtype: Allow another dtype for activations and matrix products, or for the moments, which are
            converted.
        override_freeze: Allow other frozen parameters. Newly trained parameters start with zero moments.
    """

    allow: list[Allowed] = field(default_factory=list)
    reshard: bool = False
    override_scheduler: bool = False
    use_checkpoint_scheduler: bool = False
    override_batch_size: bool = False
    override_data: bool = False
    override_dropout: bool = False
    override_dtype: bool = False
    override_freeze: bool = False

    @property
    def allowed(self) -> set[Allowed]:
        """Return the allowed differences, in `allow` or by their own flags."""
        is_all = Allowed.all in self.allow
        return {
            difference
            for difference, flag in FLAGS.items()
            if is_all or difference in self.allow or getattr(self, flag)
        }


@dataclass
class WriteKeys:
    """How a save is written, and the reaction to a failed save.

    Args:
        file_bytes: Maximum data bytes per safetensors file. A larger tensor gets its own file.
        commit_timeout_s: Seconds before a save is aborted.
        async_save: Write in the background. The next optimizer step copies tensors not written by then.
        staging_bytes: Maximum host memory per rank for those copies, in bytes. null allows the bytes written by this
            rank, twice for tensors split by columns. With less, the step waits for the disk.
        stall_timeout_s: Seconds the step waits for a stalled disk before the save is aborted.
        check_replicas: Saves between bitwise replica comparisons. A difference commits nothing and ends the run. 0
            disables them.
        exit_on_save_failure: Consecutive failed saves before the run ends with status 1. 0 sets no limit.
    """

    file_bytes: int = 2 << 30
    commit_timeout_s: float = 1800.0
    async_save: bool = True
    staging_bytes: int | None = None
    stall_timeout_s: float = 5.0
    check_replicas: int = 1
    exit_on_save_failure: int = 5


@dataclass
class LocalSection:
    """Local checkpoints: each host often saves its ranks' pieces into its own folder, and loads them from there.

    Args:
        dir: Each host's own folder, at the same path on all hosts, on disk or in memory (/dev/shm). null disables local
            checkpoints.
        save_interval: Iterations between local saves. 0 saves only when the run stops.
        keep: Newest local checkpoints to keep, beside the newest copied to all hosts.
        copies: How many following hosts in a ring receive each host's saves.
        flush_on_exit: Also save into `checkpoint.save` when a run stops early.
    """

    dir: str | None = None
    save_interval: int = 10
    keep: int = 2
    copies: int = 1
    flush_on_exit: bool = True


@dataclass
class CheckpointSection(
    WriteKeys, ResumeKeys, FinetuneKeys, LoadKeys, MirrorKeys, WeightsKeys, SaveKeys
):  # last base, first keys
    """Saving and loading.

    Args:
        local: Local checkpoints on each host.
    """

    local: LocalSection = field(default_factory=LocalSection)

    @property
    def folder(self) -> Path | None:
        """Return the folder for a run's saves, the shared folder if there are two. None if it saves nothing."""
        folder = self.save if self.save is not None else self.local.dir
        return None if folder is None else Path(folder)

    @property
    def loads_weights_alone(self) -> bool:
        """Return whether a load leaves out the optimizer state."""
        return self.finetune or self.no_load_optim

    @property
    def is_directed(self) -> bool:
        """Return whether the command overrides the default of resuming from the newest checkpoint."""
        return self.load != "auto" or self.ckpt_step is not None or self.loads_weights_alone


def checkpoint_problems(section: CheckpointSection) -> Iterator[str]:
    """List keys in conflict with other keys."""
    if section.mirror is not None and section.save is None:
        yield f"checkpoint.mirror={section.mirror}: needs checkpoint.save, the folder that is mirrored"
    if section.local.dir is not None and section.local.dir == section.save:
        yield f"checkpoint.local.dir={section.local.dir}: must be another folder than checkpoint.save"
    if section.use_checkpoint_scheduler and (section.override_scheduler or Allowed.lr in section.allow):
        yield "checkpoint.use_checkpoint_scheduler=true: excludes checkpoint.override_scheduler and checkpoint.allow=lr"
    if section.finetune and section.load in ("auto", "none"):
        yield f"checkpoint.finetune: needs checkpoint.load=PATH, found {section.load}"
    if section.resize and not section.finetune:
        yield "checkpoint.resize=true: needs checkpoint.finetune=true"
    if section.ckpt_step is not None and section.load == "none":
        yield f"checkpoint.ckpt_step={section.ckpt_step}: nothing is loaded with checkpoint.load=none"
