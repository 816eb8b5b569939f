"""The schema of the configuration, which Hydra fills. `checks.py` has the reasons why one cannot run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from models.config import ModelConfig
from trainer.data.section import DataSection
from trainer.schedule import ScheduleSection
from trainer.topology import Topology


class OnNonfinite(Enum):
    """What becomes of an iteration whose loss or gradient norm is no finite number."""

    stop = "stop"
    skip = "skip"


class Verify(Enum):
    """What a load checks the digests of, beyond headers and JSON files."""

    none = "none"
    touched = "touched"
    full = "full"


class Dtype(Enum):
    """The dtype of activations and matrix products; parameters and moments are float32 either way."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class RunSection:
    """Where a run lives: `dir` holds its config, metrics, TensorBoard files and, by default, its checkpoints."""

    name: str = "default"
    dir: str = "runs/${run.name}"


@dataclass
class TrainSection:
    """How long and on what to train.

    Args:
        train_iters: iterations of the whole run, resumed parts counted in.
        global_batch_size: samples of an iteration, over all ranks and micro batches.
        micro_batch_size: samples of one forward pass on one rank.
        seq_length: tokens of a sample.
        clip_grad: bound of the gradient norm over all parameters; 0 does not clip.
        deterministic: ask torch for deterministic kernels (a CPU's are).
        activation_checkpointing: keep only the inputs of blocks and run them again in the backward pass.
        eval_interval: evaluate at every multiple; 0 never.
        eval_iters: global batches of an evaluation.
        sample_interval: show a text of the model at every multiple, in the log and in TensorBoard; 0 never. It changes
            no bit of the training.
        sample_prompt: what that text begins with; empty is the beginning of a document.
        sample_tokens: how many tokens it has at most behind the prompt; each costs a forward pass, with a pipeline as
            many as an iteration.
        exit_interval: save and exit at the next multiple; 0 never.
        exit_duration_in_mins: save and exit after so many minutes; 0 never.
        exit_signal_save_seconds: SIGTERM, SIGINT or SIGUSR1 to any rank saves and exits; a process that is not through
            after so long is left with status 1. torchrun kills 30 s after SIGTERM.
        on_nonfinite: `stop` ends the run, with nothing saved of that iteration; `skip` goes on without its step.
        check_replicas_interval: compare the bits of ranks that hold the same tensor after every multiple, besides at
            saves, and end the run where two differ; 0 never.
        distributed_timeout_minutes: how long a rank waits for the others in a collective or for a message, and after
            which one that shows no sign of life is lost.
        device: `auto` takes a CUDA device where there is one; else `cpu` or `cuda`.
        dry_run: train nothing; print what every coordinate of `dry_run_ranks` ranks would hold and write.
    """

    train_iters: int = 100
    global_batch_size: int = 8
    micro_batch_size: int = 8
    seq_length: int = 128
    clip_grad: float = 1.0
    seed: int = 1234
    dtype: Dtype = Dtype.float32
    compile: bool = False
    deterministic: bool = False
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
    check_replicas_interval: int = 0
    distributed_timeout_minutes: float = 10.0
    device: str = "auto"
    dry_run: bool = False
    dry_run_ranks: int = 1


@dataclass
class OptimizerSection:
    """AdamW. `weight_decay` acts on matrices, never on biases and norms."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8


@dataclass
class ParallelSection:
    """How the state is spread over ranks; what tensor and pipeline parallelism leave is data parallel.

    Args:
        tensor_model_parallel_size: ranks over which each weight matrix is cut.
        sequence_parallel: cut what lies between the cut products along the sequence, over the same ranks.
        pipeline_model_parallel_size: ranks over which the layers are dealt out.
        num_virtual_stages_per_pipeline_rank: stages that each pipeline rank holds; above 1 the schedule interleaves.
        zero_stage: 0 replicates everything; 1 shards parameters and moments between iterations and reduces gradients
            once per iteration; 2 reduces them after every micro batch; 3 also frees gathered parameters after forward.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    num_virtual_stages_per_pipeline_rank: int = 1
    zero_stage: int = 1


@dataclass
class CheckpointSection:
    """What is saved and loaded; names and meanings are Megatron-LM's where it has them.

    Args:
        save: folder of the run's checkpoints; null saves nothing.
        save_interval: save at every multiple; 0 saves only at the end.
        save_interval_mins: save when so many minutes have passed since the last save; 0 never.
        max_checkpoint_keep: how many of the newest stay; 0 keeps all.
        keep_best: how many of those with the lowest validation loss stay too.
        save_retain_interval: multiples of it stay for ever; 0 has none.
        no_save_optim: save the weights only.
        load: `auto` continues this run from its newest valid checkpoint and starts fresh only where nothing was ever
            saved or logged; `none` starts fresh; a path names a run, its checkpoint folder, one iteration or, with
            `finetune`, a model folder of transformers or a weight file of llm.c. `none` and a path act once: when its
            launcher starts the job again, the run goes on from its own newest checkpoint.
        ckpt_step: load this iteration instead of the newest; it acts once, too.
        no_load_optim: load the weights only and go on at the saved iteration.
        finetune: load the weights only and start at iteration 0.
        reshard: allow another topology than the one that saved.
        override_scheduler: allow another learning-rate schedule or optimizer setting than the saved one.
        use_checkpoint_scheduler: take schedule and optimizer settings from the checkpoint.
        override_batch_size: allow another global_batch_size or seq_length.
        override_data: allow other data or another seed.
        verify: the digests that a load checks: `touched` those of the blocks that are read; `full` those of all blocks
            of the checkpoint, shared out between the ranks; `none`.
        file_bytes: size at which a safetensors file is full.
        commit_timeout_s: how long a save may take before it is aborted.
        async_save: write while training goes on; the next optimizer step copies what is not written by then.
        staging_bytes: host memory for those copies on each rank; null is what the rank writes, and once more what it
            has of tensors cut by columns. With less, the step waits for the disk.
        stall_timeout_s: how long that step waits for a disk that writes nothing before the save is aborted.
        check_replicas: at every so many saves, compare the bits of ranks that hold the same tensor, and commit nothing
            and end the run where two differ; 0 never.
        exit_on_save_failure: end the run after so many failed saves in a row; 0 never.
    """

    save: str | None = "${run.dir}/checkpoints"
    save_interval: int = 0
    save_interval_mins: float = 0.0
    max_checkpoint_keep: int = 0
    keep_best: int = 0
    save_retain_interval: int = 0
    no_save_optim: bool = False
    load: str = "auto"
    ckpt_step: int | None = None
    no_load_optim: bool = False
    finetune: bool = False
    reshard: bool = False
    override_scheduler: bool = False
    use_checkpoint_scheduler: bool = False
    override_batch_size: bool = False
    override_data: bool = False
    verify: Verify = Verify.touched
    file_bytes: int = 2 << 30
    commit_timeout_s: float = 1800.0
    async_save: bool = True
    staging_bytes: int | None = None
    stall_timeout_s: float = 5.0
    check_replicas: int = 1
    exit_on_save_failure: int = 0


@dataclass
class LoggingSection:
    """What is shown: a line every `log_interval` iterations, and TensorBoard files in the run's folder."""

    log_interval: int = 1
    tensorboard: bool = True


@dataclass
class Config:
    """Everything that defines a run."""

    model: ModelConfig
    data: DataSection = field(default_factory=DataSection)
    run: RunSection = field(default_factory=RunSection)
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    experiment: str | None = None


def topology_of(config: Config, world_size: int) -> Topology:
    """Return how `world_size` ranks, a multiple of the model-parallel sizes, are arranged."""
    parallel = config.parallel
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    dp = world_size // (pp * tp)
    return Topology(pp, dp, tp, vpp=parallel.num_virtual_stages_per_pipeline_rank, sp=parallel.sequence_parallel)
