"""The section `checkpoint` with the ranges of its keys, grouped as they are used; the keys themselves are flat."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from trainer.config.values import MOST_SECONDS


class Verify(Enum):
    """What a load checks the digests of, beyond headers and JSON files."""

    none = "none"
    touched = "touched"
    full = "full"


class NewRows(Enum):
    """The values of rows of a table beyond those of the loaded weights."""

    initial = "initial"
    mean = "mean"


class Allowed(Enum):
    """Differences from the saved run that a flag of `ResumeKeys` allows; `all` stands for each of them."""

    batch = "batch"
    data = "data"
    dropout = "dropout"
    dtype = "dtype"
    freeze = "freeze"
    lr = "lr"
    topology = "topology"
    all = "all"


class WeightsDtype(Enum):
    """The dtype of saves of the weights alone."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class SaveKeys:
    """When a run saves, where to, and which checkpoints stay.

    Args:
        save: folder of the run's checkpoints; null saves nothing.
        save_interval: iterations between saves; 0 saves only at the end.
        save_interval_mins: most minutes between saves; 0 never.
        max_checkpoint_keep: newest checkpoints that are kept; 0 keeps all. Without `finetune`, retention never deletes
            the checkpoint that `ckpt_step`, or a path in `load`, names while that command trains; one that `auto` finds
            is not exempt.
        keep_best: checkpoints with the lowest validation loss, kept too.
        save_retain_interval: keep checkpoints at multiples of so many iterations; 0 exempts none.
        full_steps: iterations saved and kept too, always with the optimizer's state, such as ``[1000,5000]``.
        no_save_optim: save the weights only.
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
    """Saves of the weights alone.

    Args:
        save_weights_interval: iterations between saves of the weights alone, into ``weights`` of `save`; 0 saves none.
        save_steps: iterations whose weights are saved too, such as ``[0,1,2,4]``; 0 is the start.
        weights_dtype: dtype of weights saved alone.
        weights_keep: newest saves of weights alone kept, beside `save_steps`; 0 keeps all.
    """

    save_weights_interval: int = 0
    save_steps: list[int] = field(default_factory=list)
    weights_dtype: WeightsDtype = WeightsDtype.bfloat16
    weights_keep: int = 0


@dataclass
class MirrorKeys:
    """The copy of the run's checkpoints in an object store.

    Args:
        mirror: URL in a store, such as ``s3://bucket/run``, to which each host uploads `save`, weights and adapters
            too; null for none.
        mirror_keep: newest checkpoints that stay in the store; 0 keeps all.
        mirror_interval: mirror multiples of n save intervals, and the run's last checkpoint.
        mirror_wait_s: most seconds that a run's end waits for the mirror; after a signal a tenth.
    """

    mirror: str | None = None
    mirror_keep: int = 0
    mirror_interval: int = 1
    mirror_wait_s: float = 60.0


@dataclass
class LoadKeys:
    """The checkpoint from which a run starts.

    Args:
        load: `auto` continues from the run's newest valid checkpoint, and starts fresh only where the run has none and
            recorded no save; `none` starts fresh; a path or URL names a run, its checkpoint folder, an iteration or,
            with `finetune`, a transformers folder or llm.c weight file. `none` and paths act once: restarts continue
            from the run's own checkpoints. Without ``model=`` and ``experiment=``, a path to a checkpoint brings its
            configuration, and one to a transformers folder its model.
        ckpt_step: iteration to load instead of the newest, once.
        no_load_optim: load the weights only, and continue at the saved iteration.
    """

    load: str = "auto"
    ckpt_step: int | None = None
    no_load_optim: bool = False


@dataclass
class FinetuneKeys:
    """The use of another run's weights.

    Args:
        finetune: load the weights only, and start at iteration 0.
        base: frozen weights beneath `model.lora`: a path as in `load`; null takes `load`, with `finetune`. A resume
            needs the same weights.
        resize: with `finetune`, allow another `model.vocab_size` or `model.max_position_embeddings`; rows are kept by
            number.
        new_rows: with `resize`, values of new rows: `initial`, a fresh run's, or `mean`, of all loaded rows.
        partial: with `finetune`, shell patterns of the weights to load, such as ``[model.embed_tokens.*]``; others stay
            initial. Empty loads all.
    """

    finetune: bool = False
    base: str | None = None
    resize: bool = False
    new_rows: NewRows = NewRows.initial
    partial: list[str] = field(default_factory=list)


@dataclass
class ResumeKeys:
    """Differences from the saved run allowed by a resume, and the digests checked.

    Args:
        allow: differences to allow, such as ``lr,batch,dtype``: each stands for the flag below, `topology` for
            `reshard` and `lr` for `override_scheduler`; `all` allows each of them, and logs their list.
        reshard: allow another topology (ranks, parallel sizes, ZeRO stage) or micro_batch_size.
        override_scheduler: allow another schedule, other optimizer settings or clip_grad.
        use_checkpoint_scheduler: take schedule and optimizer settings from the checkpoint.
        override_batch_size: allow another global_batch_size, batch_schedule or seq_length.
        override_data: allow other data or another seed.
        override_dropout: allow other dropout rates.
        override_dtype: allow another dtype of activations and matrix products, or of the moments, which are converted.
        override_freeze: allow other frozen parameters; newly trained ones begin with zero moments.
        verify: digests checked by a load, besides headers and JSON files: `touched`, of blocks read; `full`, of all
            blocks; `none`.
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
    verify: Verify = Verify.touched


@dataclass
class WriteKeys:
    """How a save is written, and the reaction to a failed save.

    Args:
        file_bytes: bytes at which a safetensors file is full.
        commit_timeout_s: seconds after which a save is aborted.
        async_save: write in the background; the next optimizer step copies tensors not written by then.
        staging_bytes: most bytes of each rank's host memory for those copies; null allows what the rank writes, twice
            for tensors split by columns. With less, the step waits for the disk.
        stall_timeout_s: seconds that step waits for a stalled disk before the save is aborted.
        check_replicas: saves between bitwise comparisons of replicas; a difference commits nothing and ends the run. 0
            never.
        exit_on_save_failure: failed saves in a row that end the run with status 1; 0 never.
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
    """Local checkpoints: each host saves its ranks' pieces into a folder of its own, often, and loads them from there.

    Args:
        dir: each host's own folder, at one path on all, on disk or in memory (/dev/shm); null for none.
        save_interval: iterations between local saves; 0 saves only when the run stops.
        keep: newest local checkpoints kept, beside the newest copied to all hosts.
        copies: next hosts in a ring to which each copies its saves.
        adopt: take local checkpoints as the run's own where its folder and shared checkpoints are gone.
        flush_on_exit: also save into `checkpoint.save` when a run stops early.
    """

    dir: str | None = None
    save_interval: int = 10
    keep: int = 2
    copies: int = 1
    adopt: bool = False
    flush_on_exit: bool = True


@dataclass
class CheckpointSection(
    WriteKeys, ResumeKeys, FinetuneKeys, LoadKeys, MirrorKeys, WeightsKeys, SaveKeys
):  # last base, first keys
    """Saving and loading.

    Args:
        local: checkpoints on single hosts.
    """

    local: LocalSection = field(default_factory=LocalSection)

    @property
    def loads_weights_alone(self) -> bool:
        """Return whether a load leaves out the state of the optimizer."""
        return self.finetune or self.no_load_optim

    @property
    def is_directed(self) -> bool:
        """Return whether the command sets where the run begins; without that it resumes from its newest checkpoint."""
        return self.load != "auto" or self.ckpt_step is not None or self.loads_weights_alone


# The keys that have no use where nothing is saved, all of them 0 or more.
_OF_SAVING = (
    "save_interval",
    "save_interval_mins",
    "max_checkpoint_keep",
    "keep_best",
    "save_retain_interval",
    "check_replicas",
    "exit_on_save_failure",
    "save_weights_interval",
    "weights_keep",
)
_OF_MIRROR = ("mirror_keep", "mirror_interval", "mirror_wait_s")
_OF_LOCAL = ("save_interval", "keep", "copies", "flush_on_exit")


def unused_checkpoint_keys(section: CheckpointSection) -> list[str]:
    """Return a line for each key set without use, as nothing is saved."""
    lines = []
    for table, defaults, prefix, folder, names in (
        (section, CheckpointSection(), "checkpoint", "save", (*_OF_SAVING, "save_steps", "full_steps")),
        (section, CheckpointSection(), "checkpoint", "mirror", _OF_MIRROR),
        (section.local, LocalSection(), "checkpoint.local", "dir", _OF_LOCAL),
    ):
        keys = [name for name in names if getattr(table, name) != getattr(defaults, name)]
        if keys and getattr(table, folder) is None:
            listed = ", ".join(f"{prefix}.{name}={getattr(table, name)}" for name in keys)
            lines.append(f"{prefix}.{folder} is null, so these keys are not used: {listed}")
    return lines


def checkpoint_problems(section: CheckpointSection) -> list[str]:
    """Return every key of the section outside its range, or in contradiction to another key."""
    problems = [*_save_problems(section), *_mirror_problems(section), *_local_problems(section)]
    return [*problems, *_load_problems(section)]


def _save_problems(section: CheckpointSection) -> list[str]:
    problems = [
        f"checkpoint.{name}={getattr(section, name)}: must be 0 or more"
        for name in _OF_SAVING
        if getattr(section, name) < 0
    ]
    if any(step < 0 for step in section.save_steps):
        problems.append(f"checkpoint.save_steps={section.save_steps}: must be iterations of 0 or more")
    if any(step < 1 for step in section.full_steps):
        problems.append(f"checkpoint.full_steps={section.full_steps}: must be iterations of 1 or more")
    if section.file_bytes < 1:
        problems.append(f"checkpoint.file_bytes={section.file_bytes}: must be at least 1")
    for name in ("commit_timeout_s", "stall_timeout_s"):
        if not 0 < getattr(section, name) <= MOST_SECONDS:
            problems.append(f"checkpoint.{name}={getattr(section, name)}: must be above 0 and at most {MOST_SECONDS:g}")
    if section.staging_bytes is not None and section.staging_bytes < 0:
        problems.append(f"checkpoint.staging_bytes={section.staging_bytes}: must be 0 or more, or null")
    return problems


def _mirror_problems(section: CheckpointSection) -> list[str]:
    problems = []
    if section.mirror is not None and section.save is None:
        problems.append(f"checkpoint.mirror={section.mirror}: needs checkpoint.save, the folder that is mirrored")
    for name, least in (("mirror_keep", 0), ("mirror_interval", 1), ("mirror_wait_s", 0)):
        if not least <= getattr(section, name) <= MOST_SECONDS:
            problems.append(f"checkpoint.{name}={getattr(section, name)}: must be {least} or more")
    return problems


def _local_problems(section: CheckpointSection) -> list[str]:
    problems = [
        f"checkpoint.local.{name}={getattr(section.local, name)}: must be {least} or more"
        for name, least in (("save_interval", 0), ("keep", 1), ("copies", 0))
        if getattr(section.local, name) < least
    ]
    if section.local.dir is not None and section.local.dir == section.save:
        problems.append(f"checkpoint.local.dir={section.local.dir}: must be another folder than checkpoint.save")
    return problems


def _load_problems(section: CheckpointSection) -> list[str]:
    problems = []
    if section.use_checkpoint_scheduler and (section.override_scheduler or Allowed.lr in section.allow):
        name = "override_scheduler" if section.override_scheduler else "allow=lr"
        problems.append(f"checkpoint.{name} and checkpoint.use_checkpoint_scheduler exclude each other")
    if section.finetune and section.load in ("auto", "none"):
        problems.append(f"checkpoint.finetune: needs checkpoint.load=PATH, found {section.load}")
    for name in ("resize", "partial"):
        if getattr(section, name) and not section.finetune:
            problems.append(f"checkpoint.{name}={getattr(section, name)}: needs checkpoint.finetune=true")
    if section.new_rows is not NewRows.initial and not section.resize:
        problems.append(f"checkpoint.new_rows={section.new_rows.value}: needs checkpoint.resize=true")
    if section.ckpt_step is not None and section.ckpt_step < 0:
        problems.append(f"checkpoint.ckpt_step={section.ckpt_step}: must be 0 or more, or null")
    if section.ckpt_step is not None and section.load == "none":
        problems.append(f"checkpoint.ckpt_step={section.ckpt_step}: nothing is loaded with checkpoint.load=none")
    return problems
