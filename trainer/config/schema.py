"""The schema of the configuration, which Hydra fills. `checks.py` has the reasons why one cannot run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from models.config import ModelConfig
from trainer.data.section import DataSection
from trainer.schedules.lr import ScheduleSection


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


class NewRows(Enum):
    """The values of rows of a table that the loaded weights do not have."""

    initial = "initial"
    mean = "mean"


class WeightsDtype(Enum):
    """The dtype of saves of the weights alone."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class RunSection:
    """The run's name and folder.

    Args:
        name: name of the run; the same command with the same name continues it.
        dir: folder of the run's configuration, metrics, TensorBoard files and, by default, checkpoints.
    """

    name: str = "default"
    dir: str = "runs/${run.name}"


@dataclass
class TrainSection:
    """Length, batches, precision, evaluation and exit of a run.

    Args:
        train_iters: iterations of the whole run, including those before a resume; not used with `train_samples`.
        train_samples: samples of the whole run instead: it ends before the iteration that would pass them. null counts
            iterations.
        global_batch_size: samples per iteration, over all ranks and micro-batches.
        batch_schedule: sizes of the global batch by consumed samples, as in ``0:8 4k:16 16k:32``: 8 samples per
            iteration, 16 from the first iteration on that begins after 4,000 samples or more, then 32. The last size
            must be `global_batch_size`, which is the size of evaluations. null keeps one size.
        micro_batch_size: samples per forward pass on one data-parallel rank.
        seq_length: tokens per sample.
        freeze: shell patterns over the names of stored tensors, which are those of transformers, as in
            `["transformer.h.0.*"]`: parameters that fit one stay unchanged, without gradients and optimizer state.
        clip_grad: upper bound of the gradient's L2 norm over all parameters; 0 disables clipping.
        seed: seed of the initial weights, the order of samples and dropout.
        dtype: dtype of activations and matrix products; parameters and optimizer state are float32 either way.
        compile: compile each transformer block with torch.compile.
        deterministic: restrict torch to deterministic kernels; those of a CPU always are.
        threads: compute threads of each rank, on which bits depend on a CPU; 0 takes OMP_NUM_THREADS, else the rank's
            share of the cores of its host.
        activation_checkpointing: keep only the inputs of transformer blocks and recompute these in the backward pass.
        eval_interval: iterations between evaluations on the validation data; 0 never evaluates.
        eval_iters: global batches per evaluation.
        sample_interval: iterations between texts sampled from the model, shown in the log and in TensorBoard; 0 never
            samples. Sampling changes no bit of the training.
        sample_prompt: text that a sample begins with; empty begins a document.
        sample_tokens: most tokens of a sample beyond its prompt; each costs a forward pass, in a pipeline an iteration.
        exit_interval: save and exit at the next multiple of so many iterations; 0 never.
        exit_duration_in_mins: save and exit after so many minutes; 0 never.
        exit_signal_save_seconds: seconds that a run has to save and exit after SIGTERM, SIGINT or SIGUSR1 reaches any
            rank; a process that needs longer exits with status 1. torchrun kills 30 s after SIGTERM.
        on_nonfinite: reaction to a loss or gradient norm that is not finite: `stop` ends the run and saves nothing of
            that iteration, `skip` continues without its optimizer step.
        check_replicas_interval: iterations between comparisons of the bits of ranks that hold the same tensor, in
            addition to those at saves; a difference ends the run. 0 never compares.
        distributed_timeout_minutes: minutes that a rank waits for the others in a collective or for a message, and
            after which a silent rank counts as lost.
        device: `cpu`, `cuda` (ROCm too), `xpu`, or `auto`: the accelerator where there is one, else the CPU.
        profile_steps: first and last iteration of a trace by torch.profiler, as in `[10,13]`; one per rank is written.
        dry_run: train nothing; print what each of `dry_run_ranks` ranks would hold and write.
        dry_run_ranks: number of ranks that a dry run describes.
    """

    train_iters: int = 100
    train_samples: int | None = None
    global_batch_size: int = 8
    batch_schedule: str | None = None
    micro_batch_size: int = 4
    seq_length: int = 128
    freeze: list[str] = field(default_factory=list)
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
    check_replicas_interval: int = 0
    distributed_timeout_minutes: float = 10.0
    device: str = "auto"
    profile_steps: list[int] = field(default_factory=list)
    dry_run: bool = False
    dry_run_ranks: int = 1


class OptimizerName(Enum):
    """An optimizer; `muon` steps the matrices of the blocks by Muon and all other parameters by AdamW."""

    adamw = "adamw"
    muon = "muon"


@dataclass
class OptimizerSection:
    """The optimizer.

    Args:
        name: `adamw`, or `muon`: Muon for the matrices of the blocks and AdamW for all other parameters.
        lr: peak learning rate.
        weight_decay: decoupled weight decay of matrices; biases and norms have none.
        adam_beta1: decay rate of the first moment, per iteration.
        adam_beta2: decay rate of the second moment, per iteration.
        adam_eps: term added to the denominator of the update.
        muon_momentum: share of the momentum that a step keeps, in Nesterov's form.
        muon_ns_steps: Newton-Schulz iterations that orthogonalize an update.
        muon_match_rms_adamw: scale an update of Muon to the size of AdamW's, by 0.2 sqrt(max(rows, columns)), so that
            `lr` and `weight_decay` of AdamW serve both; false scales by sqrt(max(1, rows / columns)) of the stored
            matrix. These are `match_rms_adamw` and `original` of torch's `adjust_lr_fn`.
    """

    name: OptimizerName = OptimizerName.adamw
    lr: float = 1e-3
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    muon_momentum: float = 0.95
    muon_ns_steps: int = 5
    muon_match_rms_adamw: bool = True


@dataclass
class ParallelSection:
    """Distribution of the state over ranks; ranks that tensor and pipeline parallelism leave over are data parallel.

    Args:
        tensor_model_parallel_size: ranks over which each weight matrix is split.
        sequence_parallel: split activations between the split products along the sequence, over the same ranks.
        pipeline_model_parallel_size: ranks over which the layers are split.
        num_virtual_stages_per_pipeline_rank: pipeline stages per pipeline rank; above 1 the schedule interleaves them.
        zero_stage: 0 replicates the state; 1 shards parameters and moments between iterations and reduces gradients
            once per iteration; 2 reduces them after every micro-batch; 3 also frees gathered parameters after the
            forward pass.
        invariant_ranks: the largest number of data-parallel ranks up to which losses and checkpoints have the same
            bits, at any ZeRO stage and with any pipeline; a power of two that divides the micro batches of an
            iteration. 0 leaves the order of sums to the topology.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    num_virtual_stages_per_pipeline_rank: int = 1
    zero_stage: int = 1
    invariant_ranks: int = 0


@dataclass
class LocalSection:
    """Local checkpoints: each host saves what its ranks hold into a folder of its own, often, and loads it from there.

    Args:
        dir: a folder of each host's own, at the same path on all: a local disk, or memory such as /dev/shm; null saves
            no local checkpoints.
        save_interval: iterations between local saves; 0 saves only when the run stops.
        keep: number of newest local checkpoints that are kept, beside the newest that is copied to all hosts.
        copies: number of hosts, those that follow in a ring, to which each host copies what it saved.
        adopt: take the local checkpoints for the run's own where nothing else is left of it, neither its folder nor a
            shared checkpoint; false refuses them.
        flush_on_exit: also save into `checkpoint.save` when a signal, a time limit or an exit interval stops the run.
    """

    dir: str | None = None
    save_interval: int = 10
    keep: int = 2
    copies: int = 1
    adopt: bool = False
    flush_on_exit: bool = True


@dataclass
class CheckpointSection:
    """Saving and loading; names and meanings are those of Megatron-LM where it has them.

    Args:
        save: folder of the run's checkpoints; null saves nothing.
        save_interval: iterations between saves; 0 saves only at the end of the run.
        save_interval_mins: save when so many minutes have passed since the last save; 0 never.
        max_checkpoint_keep: number of newest checkpoints that are kept; 0 keeps all.
        keep_best: number of checkpoints with the lowest validation loss that are kept as well.
        save_retain_interval: checkpoints at multiples of so many iterations are never deleted; 0 exempts none.
        no_save_optim: save the weights only.
        save_weights_interval: iterations between saves of the weights alone, into the folder ``weights`` of `save`, on
            top of full checkpoints; 0 saves none. No run resumes from them by itself.
        save_steps: iterations at which the weights are saved too, such as ``[0,1,2,4,8]``; 0 is the start of the run.
        weights_dtype: dtype of these weights, to which each rank rounds its own shards.
        weights_keep: number of newest saves of the weights that are kept, beside those of `save_steps`, which all stay;
            0 keeps all.
        load: `auto` continues this run from its newest valid checkpoint and starts fresh only where nothing was ever
            saved or logged; `none` starts fresh; a path names a run, its checkpoint folder, one iteration or, with
            `finetune`, a model folder of transformers or a weight file of llm.c. `none` and a path act once: when the
            launcher restarts the job, the run continues from its own newest checkpoint. With a path to a checkpoint, a
            command without ``model=`` and ``experiment=`` takes the configuration from it, under its own keys.
        ckpt_step: iteration to load instead of the newest; it acts once, like a path in `load`. Retention keeps it
            while the command trains.
        no_load_optim: load the weights only and continue at the saved iteration.
        finetune: load the weights only and start at iteration 0.
        base: the frozen weights beneath the adapters of `model.lora`: a run, a checkpoint, one iteration, a model
            folder of transformers or a weight file of llm.c; null takes the path of `load`, with `finetune`. A resume
            needs the same weights, at any path.
        resize: with `finetune`, allow another `model.vocab_size` or `model.max_position_embeddings` than that of the
            loaded weights: rows of the tables are kept by number.
        new_rows: with `resize`, the values of rows beyond the loaded ones: `initial` for those of a fresh run, `mean`
            for the mean of all loaded rows.
        partial: with `finetune`, shell patterns for the names of the weights to load, such as
            ``[model.embed_tokens.*]``; all others keep their initial values, and the log lists them. Empty loads all.
        reshard: allow another topology than the one that saved (number of ranks, parallel sizes, ZeRO stage), or
            another micro_batch_size.
        override_scheduler: allow another learning-rate schedule, other optimizer settings or another clip_grad than the
            saved ones.
        use_checkpoint_scheduler: take the schedule and the optimizer settings from the checkpoint.
        override_batch_size: allow another global_batch_size, batch_schedule or seq_length than the saved one.
        override_data: allow other data or another seed than the saved ones.
        override_dropout: allow other dropout rates than the saved ones.
        override_dtype: allow another dtype of activations and matrix products than the saved one.
        override_freeze: allow other frozen parameters than the saved ones; those that are trained only from now on
            begin with zero moments.
        verify: digests that a load checks beyond those of headers and JSON files: `touched` checks the blocks that are
            read, `full` all blocks of the checkpoint, shared between the ranks, `none` no block.
        file_bytes: size in bytes at which a safetensors file is full.
        commit_timeout_s: seconds after which a save is aborted.
        async_save: write in the background while training continues; the next optimizer step copies what is not written
            by then.
        staging_bytes: upper bound in bytes of the host memory for those copies on each rank; null allows as much as the
            rank writes, plus the same again for tensors split by columns. With less, the step waits for the disk.
        stall_timeout_s: seconds that this step waits for a disk that writes nothing before the save is aborted.
        check_replicas: compare the bits of ranks that hold the same tensor at every so many saves; a difference commits
            nothing and ends the run. 0 never compares.
        exit_on_save_failure: end the run after so many failed saves in a row; 0 never.
        local: checkpoints on the disks or in the memory of single hosts.
    """

    save: str | None = "${run.dir}/checkpoints"
    save_interval: int = 20
    save_interval_mins: float = 0.0
    max_checkpoint_keep: int = 0
    keep_best: int = 0
    save_retain_interval: int = 0
    no_save_optim: bool = False
    save_weights_interval: int = 0
    save_steps: list[int] = field(default_factory=list)
    weights_dtype: WeightsDtype = WeightsDtype.bfloat16
    weights_keep: int = 0
    load: str = "auto"
    ckpt_step: int | None = None
    no_load_optim: bool = False
    finetune: bool = False
    base: str | None = None
    resize: bool = False
    new_rows: NewRows = NewRows.initial
    partial: list[str] = field(default_factory=list)
    reshard: bool = False
    override_scheduler: bool = False
    use_checkpoint_scheduler: bool = False
    override_batch_size: bool = False
    override_data: bool = False
    override_dropout: bool = False
    override_dtype: bool = False
    override_freeze: bool = False
    verify: Verify = Verify.touched
    file_bytes: int = 2 << 30
    commit_timeout_s: float = 1800.0
    async_save: bool = True
    staging_bytes: int | None = None
    stall_timeout_s: float = 5.0
    check_replicas: int = 1
    exit_on_save_failure: int = 0
    local: LocalSection = field(default_factory=LocalSection)


# The outputs of metrics beside `metrics.jsonl`, by name: the class of each, a `MetricSink`.
SINKS = {
    "tensorboard": "trainer.metrics.tensorboard_sink.TensorboardSink",
}


@dataclass
class LoggingSection:
    """The log and the metrics.

    Args:
        log_interval: iterations between lines of the log.
        tensorboard: write TensorBoard files into the run's folder.
        sinks: further outputs of metrics, by their names in `trainer/config/schema.py`; an output that fails does not
            end the run.
    """

    log_interval: int = 1
    tensorboard: bool = True
    sinks: list[str] = field(default_factory=list)


def sink_names(section: LoggingSection) -> list[str]:
    """Return the names of a run's outputs of metrics, beside `metrics.jsonl`."""
    return list(dict.fromkeys([*(["tensorboard"] if section.tensorboard else []), *section.sinks]))


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
