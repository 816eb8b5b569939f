"""Writes a folder for megatron-core's `dist_checkpointing`, which loads into a `GPTModel` and its optimizer."""

from __future__ import annotations

import argparse
import io
import logging
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from models.config import Activation, ModelConfig, RopeScaling
from models.families import has_field, stored_tensors
from reprise.errors import MismatchError, count_of
from reprise.format import STATE
from reprise.loading import Checkpoint
from reprise.storage import json_file
from trainer.interop.dcp.streaming import StreamingPlanner, sync_folder, write_folder
from trainer.interop.formats import ExportOptions
from trainer.interop.megatron.arguments import OTHERS, REQUIRED
from trainer.interop.megatron.names import LAYERS, Correspondence, correspondences, names_of
from trainer.interop.megatron.torch_dist import BACKEND, COMMON, METADATA, TORCH_DIST
from trainer.interop.new_output import new_output
from trainer.interop.saved_run import SavedRun, saved_run
from trainer.interop.source import MOMENTS
from trainer.schedules.lr import DecayStyle

_log = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
_SHARDING = "fully_reshardable"
_MASTERS = "param"  # the optimizer's weight copies in this sharding form
_DECAY_STYLES = {
    DecayStyle.cosine: "cosine",
    DecayStyle.linear: "linear",
    DecayStyle.constant: "constant",
    DecayStyle.wsd: "WSD",
}
# Modules with extra state. It is empty, but `load` requests it.
_EXTRA = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
_Place = tuple[str, tuple[int, ...]]  # a key, and a chunk's offset


def write(checkpoint: Checkpoint, out: Path, options: ExportOptions) -> None:
    """Write `out`, a Megatron-LM folder with one iteration, atomically. Only a single file's tensors are in memory.

    Weights and moments are float32, stacked by layer, without padded vocabulary rows: `load` fills a padded table from
    its first row. The optimizer has the fully reshardable form used with `--use-distributed-optimizer`.

    Raises:
        MismatchError: Megatron lacks such a model or schedule, or the optimizer is not AdamW.
        CheckpointError: `out` exists, the checkpoint is damaged, or the file system fails.
    """
    files, run = options.files, saved_run(checkpoint, to="Megatron")
    model, style, where = run.source.model, run.schedule.style, checkpoint.path / STATE
    names_of(model.family, where=checkpoint.path)
    _refuse_scaling(model, where=checkpoint.path)
    if style not in _DECAY_STYLES:
        raise MismatchError(
            "Megatron does not support this learning-rate schedule",
            where=where,
            expected=f"schedule.lr_decay_style={' or '.join(style.value for style in _DECAY_STYLES)}",
            found=f"schedule.lr_decay_style={style.value}",
        )
    common, planner, iteration = _common(run), _Planner(run), run.counters["iteration"]
    with new_output(out, files) as partial:
        folder = partial / f"iter_{iteration:07d}"
        files.make_folder(partial)
        files.make_folder(folder)
        write_folder(folder, {}, planner, total_bytes=planner.total_bytes)
        buffer = io.BytesIO()
        torch.save(common, buffer)
        files.write_whole(folder / COMMON, buffer.getvalue())
        files.write_whole(folder / METADATA, json_file.to_bytes(_METADATA))
        files.write_whole(partial / TRACKER, str(iteration).encode())
        sync_folder(files, folder)


_METADATA = {
    BACKEND: TORCH_DIST,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def _refuse_scaling(model: ModelConfig, *, where: object) -> None:
    """Refuse a rotary scaling with other constants than LLaMA 3.1's, which Megatron has."""
    scaling = model.rope_scaling
    if scaling is not None and scaling != RopeScaling(scaling.factor):
        raise MismatchError(
            "Megatron does not support this rotary scaling",
            where=where,
            expected=f"model.rope_scaling={RopeScaling(scaling.factor)}",
            found=scaling,
        )


class _Planner(StreamingPlanner):
    """Plans a chunk for every layer in every tensor, and reads each chunk when it is written."""

    def __init__(self, run: SavedRun) -> None:
        super().__init__(self._value, flatten_state_dict=False)
        self._source, self._trained = run.source, frozenset(run.trained)
        self._places = dict[_Place, tuple[str, Correspondence]]()
        self._items = list(self._planned(run.source.model, (_MASTERS, *MOMENTS) if run.source.has_optimizer else ()))
        chunks = [item.tensor_data.chunk for item in self._items if item.tensor_data is not None]
        self.total_bytes = sum(4 * prod(chunk.sizes) for chunk in chunks)
        if run.source.has_optimizer and (frozen := stored_tensors(run.source.model).keys() - self._trained):
            _log.warning(f"the moments of {count_of(len(frozen), 'frozen parameter')} are written as zeros")

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def _planned(self, model: ModelConfig, kinds: tuple[str, ...]) -> Iterator[WriteItem]:
        tensors = correspondences(model)
        for kind in ("", *kinds):
            root = f"optimizer.state.{kind}." if kind else ""
            for correspondence in tensors:
                layer, shape = correspondence.tensor.layer, correspondence.tensor.shape
                first = () if layer is None else (layer,)
                offset = (*first, *(0 for _ in shape))
                full = shape if layer is None else (model.n_layer, *shape)
                key = root + correspondence.tensor.stacked
                self._places[key, offset] = kind, correspondence
                yield _item(key, offset, (*(1 for _ in first), *shape), full)
        for layer in range(model.n_layer):
            for module in _EXTRA:
                key = f"{LAYERS}.{module}._extra_state/shard_{layer}_{model.n_layer}"
                yield WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)

    def _value(self, index: MetadataIndex) -> Any:
        if index.offset is None:
            return [None]
        offset = tuple(index.offset)
        kind, correspondence = self._places[index.fqn, offset]
        tensor = correspondence.join([self._ours(kind, name) for name in correspondence.names])
        return tensor.reshape(1, *tensor.shape) if correspondence.tensor.layer is not None else tensor

    def _ours(self, kind: str, name: str) -> torch.Tensor:
        if kind in ("", _MASTERS):
            return self._source.read(name).to(torch.float32)
        if name not in self._trained:
            return torch.zeros_like(self._source.read(name), dtype=torch.float32)
        return self._source.read(f"{kind}.{name}").to(torch.float32)


def _item(key: str, offset: tuple[int, ...], sizes: tuple[int, ...], full: tuple[int, ...]) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(full))
    return WriteItem(MetadataIndex(key, torch.Size(offset)), WriteItemType.SHARD, tensor_data=data)


def _steps(run: SavedRun) -> float:
    """Return the optimizer's step count. Megatron keeps a single count."""
    counts = {float(run.source.read(f"step.{name}")) for name in run.trained}
    if len(counts) > 1:
        _log.warning(f"AdamW's step counts differ, {sorted(counts)}: the largest is written")
    return max(counts, default=0.0)


def _common(run: SavedRun) -> dict[str, Any]:
    """Return the content for `common.pt`."""
    model, schedule, decay = run.source.model, run.schedule, run.groups[0]["weight_decay"]
    iteration, samples = run.counters["iteration"], run.counters["consumed_samples"]
    content: dict[str, Any] = {
        "args": argparse.Namespace(**arguments_of(model), iteration=iteration, consumed_train_samples=samples),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    if not run.source.has_optimizer:
        return content
    content["content_metadata"]["distrib_optim_sharding_type"] = _SHARDING
    content["optimizer"] = {
        "optimizer": {"param_groups": _groups(run)},
        "param_state_sharding_type": _SHARDING,
    }
    in_samples = 1.0 if schedule.is_in_samples or not iteration else samples / iteration
    content["opt_param_scheduler"] = {
        "max_lr": schedule.lr,
        "min_lr": schedule.min_lr,
        "lr_warmup_steps": round(schedule.warmup * in_samples),
        "lr_decay_steps": round(schedule.decay * in_samples),
        "lr_decay_style": _DECAY_STYLES[schedule.style],
        "num_steps": samples,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_steps": 0,
        "wd_incr_style": "constant",
    }
    return content


def _groups(run: SavedRun) -> list[dict[str, Any]]:
    """Return the parameter groups with torch AdamW's settings and Megatron's own, with and without weight decay.

    Their step count may differ from the iteration.
    """
    steps, groups = _steps(run), list[dict[str, Any]]()
    for saved, multiple in zip(run.groups, (1.0, 0.0), strict=True):
        group = {name: value for name, value in saved.items() if name not in ("params", "initial_lr")}
        group |= {
            "wd_mult": multiple,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": run.schedule.lr,
            "min_lr": run.schedule.min_lr,
            "step": steps,
        }
        groups.append(group)
    return groups


def arguments_of(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron-LM's arguments for a model. `arguments.describe` reads them back."""
    names, scaling = names_of(model.family, where="the model"), model.rope_scaling
    fuses_gelu = has_field(model.family, "activation") and model.activation is Activation.gelu_tanh
    return {
        **{name: getattr(model, key) for key, name in {**REQUIRED, **OTHERS}.items()},
        "group_query_attention": model.n_kv_head != model.n_head,
        "num_query_groups": model.n_kv_head,
        "kv_channels": model.head_width,
        "add_position_embedding": True,
        "rotary_base": int(model.rope_theta) if model.rope_theta.is_integer() else model.rope_theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rope_scaling_factor": 8.0 if scaling is None else scaling.factor,
        "apply_layernorm_1p": False,
        "bias_gelu_fusion": fuses_gelu,
        "untie_embeddings_and_output_weights": not model.tie_word_embeddings,
        "padded_vocab_size": model.vocab_size,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "use_distributed_optimizer": True,
        "consumed_valid_samples": 0,
        # With --vocab-file, Megatron-LM asserts these values in a run too.
        "make_vocab_size_divisible_by": 128,
        "tokenizer_type": names.tokenizer_type,
        "add_qkv_bias": False,
        **{name: values[0] for name, values in names.arguments.items()},
        "use_rope_scaling": scaling is not None,
    }
