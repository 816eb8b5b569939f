"""Flags of Megatron-LM and the equivalent keys here; docs/megatron_flags.md has the differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from reprise.errors import ConfigError
from trainer.config.options import keys
from trainer.config.overrides import hint_of, text_value

# Each flag with its keys, separated by spaces; a flag without a key has no counterpart.
FLAGS = {
    "--save": "checkpoint.save",
    "--load": "checkpoint.load",
    "--save-interval": "checkpoint.save_interval",
    "--persistent-save-interval": "checkpoint.save_interval",
    "--save-retain-interval": "checkpoint.save_retain_interval",
    "--ckpt-step": "checkpoint.ckpt_step",
    "--finetune": "checkpoint.finetune",
    "--pretrained-checkpoint": "checkpoint.load",
    "--no-load-optim": "checkpoint.no_load_optim",
    "--no-save-optim": "checkpoint.no_save_optim",
    "--no-load-rng": "",
    "--no-save-rng": "",
    "--exit-on-missing-checkpoint": "",
    "--use-checkpoint-args": "checkpoint.load",
    "--use-mp-args-from-checkpoint-args": "checkpoint.load",
    "--override-opt-param-scheduler": "checkpoint.override_scheduler",
    "--use-checkpoint-opt-param-scheduler": "checkpoint.use_checkpoint_scheduler",
    "--ckpt-format": "",
    "--dist-ckpt-format": "",
    "--use-dist-ckpt": "",
    "--dist-ckpt-optim-fully-reshardable": "",
    "--ckpt-convert-format": "",
    "--ckpt-convert-save": "",
    "--dist-ckpt-strictness": "",
    "--no-ckpt-load-validate-sharding-integrity": "",
    "--verify-integrity": "checkpoint.verify",
    "--async-save": "checkpoint.async_save",
    "--async-strategy": "checkpoint.async_save",
    "--use-persistent-ckpt-worker": "checkpoint.async_save",
    "--no-ckpt-fully-parallel-save": "",
    "--ckpt-fully-parallel-load": "",
    "--ckpt-assume-constant-structure": "",
    "--non-persistent-save-interval": "checkpoint.local.save_interval checkpoint.local.dir",
    "--non-persistent-ckpt-type": "checkpoint.local.save_interval checkpoint.local.dir",
    "--non-persistent-local-ckpt-dir": "checkpoint.local.save_interval checkpoint.local.dir",
    "--replication": "checkpoint.local.copies",
    "--replication-jump": "checkpoint.local.copies",
    "--replication-factor": "checkpoint.local.copies",
    "--save-params-interval": "checkpoint.save_weights_interval",
    "--check-weight-hash-across-dp-replicas-interval": "train.check_replicas_interval checkpoint.check_replicas",
    "--train-iters": "train.train_iters",
    "--train-samples": "train.train_samples",
    "--micro-batch-size": "train.micro_batch_size",
    "--global-batch-size": "train.global_batch_size",
    "--step-batch-size-schedule": "train.batch_schedule",
    "--rampup-batch-size": "train.batch_schedule",
    "--decrease-batch-size-if-needed": "",
    "--exit-interval": "train.exit_interval",
    "--exit-duration-in-mins": "train.exit_duration_in_mins",
    "--exit-signal-handler": "",
    "--exit-signal": "",
    "--no-check-for-nan-in-loss-and-grad": "train.on_nonfinite",
    "--rerun-mode": "",
    "--iterations-to-skip": "train.skip_samples",
    "--skip-train": "",
    "--lr": "optimizer.lr",
    "--min-lr": "schedule.min_lr",
    "--lr-decay-style": "schedule.lr_decay_style",
    "--lr-decay-iters": "schedule.lr_decay_iters",
    "--lr-decay-samples": "schedule.lr_decay_samples",
    "--lr-warmup-iters": "schedule.lr_warmup_iters",
    "--lr-warmup-samples": "schedule.lr_warmup_samples",
    "--lr-warmup-fraction": "",
    "--lr-warmup-init": "",
    "--lr-wsd-decay-iters": "schedule.lr_wsd_decay_iters",
    "--lr-wsd-decay-samples": "schedule.lr_wsd_decay_samples",
    "--lr-wsd-decay-style": "",
    "--decoupled-lr": "",
    "--decoupled-min-lr": "",
    "--optimizer": "optimizer.name",
    "--weight-decay": "optimizer.weight_decay",
    "--start-weight-decay": "",
    "--end-weight-decay": "",
    "--weight-decay-incr-style": "",
    "--adam-beta1": "optimizer.adam_beta1",
    "--adam-beta2": "optimizer.adam_beta2",
    "--adam-eps": "optimizer.adam_eps",
    "--clip-grad": "train.clip_grad",
    "--freeze-all-layers": "train.freeze",
    "--muon-momentum": "optimizer.muon_momentum",
    "--muon-num-ns-steps": "optimizer.muon_ns_steps",
    "--muon-scale-mode": "optimizer.muon_match_rms_adamw",
    "--muon-extra-scale-factor": "optimizer.muon_match_rms_adamw",
    "--muon-tp-mode": "",
    "--bf16": "train.dtype",
    "--fp16": "",
    "--loss-scale": "",
    "--initial-loss-scale": "",
    "--fp8-format": "",
    "--accumulate-allreduce-grads-in-fp32": "",
    "--grad-reduce-in-bf16": "",
    "--main-params-dtype": "",
    "--exp-avg-dtype": "",
    "--exp-avg-sq-dtype": "",
    "--use-precision-aware-optimizer": "",
    "--recompute-activations": "train.activation_checkpointing",
    "--recompute-granularity": "train.activation_checkpointing",
    "--deterministic-mode": "train.deterministic",
    "--seed": "train.seed",
    "--tensor-model-parallel-size": "parallel.tensor_model_parallel_size",
    "--sequence-parallel": "parallel.sequence_parallel",
    "--pipeline-model-parallel-size": "parallel.pipeline_model_parallel_size",
    "--num-virtual-stages-per-pipeline-rank": "parallel.num_virtual_stages_per_pipeline_rank",
    "--num-layers-per-virtual-pipeline-stage": "parallel.num_virtual_stages_per_pipeline_rank",
    "--pipeline-model-parallel-layout": "",
    "--decoder-first-pipeline-num-layers": "",
    "--decoder-last-pipeline-num-layers": "",
    "--use-distributed-optimizer": "parallel.zero_stage",
    "--use-megatron-fsdp": "parallel.zero_stage",
    "--use-torch-fsdp2": "parallel.zero_stage",
    "--data-parallel-sharding-strategy": "parallel.zero_stage",
    "--num-distributed-optimizer-instances": "parallel.replicate",
    "--overlap-grad-reduce": "",
    "--overlap-param-gather": "",
    "--context-parallel-size": "",
    "--expert-model-parallel-size": "",
    "--distributed-timeout-minutes": "train.distributed_timeout_minutes",
    "--distributed-backend": "",
    "--use-tp-pp-dp-mapping": "",
    "--data-path": "data.train",
    "--train-data-path": "data.train",
    "--valid-data-path": "data.valid",
    "--test-data-path": "",
    "--split": "",
    "--seq-length": "train.seq_length",
    "--tokenizer-type": "data.tokenizer",
    "--tokenizer-model": "data.tokenizer",
    "--vocab-file": "data.tokenizer",
    "--merge-file": "data.tokenizer",
    "--data-cache-path": "data.cache",
    "--no-mmap-bin-files": "",
    "--num-workers": "",
    "--num-dataset-builder-threads": "",
    "--dataloader-type": "",
    "--eval-interval": "train.eval_interval",
    "--eval-iters": "train.eval_iters",
    "--full-validation": "",
    "--multiple-validation-sets": "",
    "--eval-global-batch-size": "",
    "--eval-micro-batch-size": "",
    "--reset-attention-mask": "data.document_mask",
    "--reset-position-ids": "data.document_mask",
    "--dataloader-inter-document-masking": "data.document_mask",
    "--eod-mask-loss": "",
    "--mock-data": "",
    "--log-interval": "logging.log_interval",
    "--tensorboard-dir": "logging.tensorboard",
    "--tensorboard-log-interval": "logging.tensorboard",
    "--log-throughput": "",
    "--log-progress": "",
    "--log-straggler": "",
    "--profile": "train.profile_steps",
    "--use-pytorch-profiler": "train.profile_steps",
    "--log-validation-ppl-to-tensorboard": "",
    "--log-params-norm": "",
    "--log-num-zeros-in-grad": "",
    "--log-memory-to-tensorboard": "",
    "--timing-log-level": "",
    "--wandb-project": "logging.publish",
    "--wandb-exp-name": "logging.publish",
    "--num-layers": "model.n_layer",
    "--hidden-size": "model.n_embd",
    "--ffn-hidden-size": "model.intermediate_size",
    "--num-attention-heads": "model.n_head model.n_kv_head",
    "--num-query-groups": "model.n_head model.n_kv_head",
    "--group-query-attention": "model.n_head model.n_kv_head",
    "--kv-channels": "model.head_dim",
    "--max-position-embeddings": "model.max_position_embeddings",
    "--position-embedding-type": "model.family",
    "--normalization": "model.family",
    "--swiglu": "model.family",
    "--disable-bias-linear": "model.family",
    "--qk-layernorm": "model.family",
    "--openai-gelu": "model.activation",
    "--no-bias-gelu-fusion": "model.activation",
    "--rotary-base": "model.rope_theta model.rope_scaling.factor",
    "--use-rope-scaling": "model.rope_theta model.rope_scaling.factor",
    "--rope-scaling-factor": "model.rope_theta model.rope_scaling.factor",
    "--untie-embeddings-and-output-weights": "model.tie_word_embeddings",
    "--make-vocab-size-divisible-by": "model.pad_vocab_multiple",
    "--norm-epsilon": "model.norm_eps",
    "--apply-layernorm-1p": "",
    "--rotary-percent": "",
    "--rotary-interleaved": "",
    "--num-experts": "",
    "--init-method-std": "model.initializer_range",
    "--hidden-dropout": "model.dropout",
    "--attention-dropout": "model.dropout",
}


def refuse_flags(words: Sequence[str]) -> None:
    """Refuse a command line with Megatron-LM's flags or keys spelled as flags, and name the key of each.

    Raises:
        ConfigError: with an override for every such flag.
    """
    answers: dict[str, str] = {}
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        flag_keys = FLAGS[flag].split() if flag in FLAGS else _keys_named(flag)
        if flag not in FLAGS and not flag_keys:
            continue
        if not equals and number + 1 < len(words) and not words[number + 1].startswith("--"):
            value = words[number + 1]
        answers[word] = f"{name}: {_answer(flag, flag_keys, value)}"
    if answers:
        raise ConfigError(
            "A command line has flags; settings have the form SECTION.KEY=VALUE",
            found=", ".join(answers),
            fix="\n  " + "\n  ".join(answers.values()) + "\n`reprise options KEY` describes a key.",
        )


def _keys_named(flag: str) -> list[str]:
    """Return the key that a flag spells; none if several keys have its name."""
    if not flag.startswith("--"):
        return []
    flag_keys = [key for key in keys() if "." in key and key.rpartition(".")[2].replace("_", "-") == flag[2:]]
    return flag_keys if len(flag_keys) == 1 else []


def _answer(flag: str, keys: Sequence[str], value: str) -> str:
    if not keys:
        return "has no counterpart, leave it out"
    has_its_name = keys[0].rpartition(".")[2] == flag.lstrip("-").replace("-", "_")
    if not has_its_name or not value:
        return f"set {' and '.join(keys)}"
    is_text = str in get_args(hint := hint_of(keys[0])) or hint is str
    return f"{keys[0]}={text_value(value) if is_text else value}"
