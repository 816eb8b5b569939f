"""Reads a checkpoint from transformers' Trainer, or accelerate's `save_state`, without either.

Sources: `_save_checkpoint` and `create_optimizer` in `trainer.py`, transformers 5.23; `checkpointing.py` and
`utils/fsdp_utils.py`, accelerate 1.15.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from models.adapters import PREFIX, A, adapter_tensors, saved_tensors
from models.config import LoraConfig
from reprise.errors import MismatchError
from reprise.format import STATE
from reprise.storage import finite_number, integer, is_dir, is_file, json_file, matching, shown
from trainer.config.frozen import frozen_names
from trainer.data.tokenizer_beside import tokenizer_files_in
from trainer.interop import deepspeed
from trainer.interop.dcp import folder as dcp_folder
from trainer.interop.dcp import source as dcp
from trainer.interop.formats import Format, ImportOptions, common_step, few, require_moments, require_trust
from trainer.interop.hf import trainer_export
from trainer.interop.hf.config import CONFIG, is_folder
from trainer.interop.hf.folder import SINGLE, mapped, open_folder, weights_source
from trainer.interop.hf.trainer_settings import with_settings
from trainer.interop.numbered import Table, entries_by_name
from trainer.interop.source import STEP, StateSource, by_kind
from trainer.interop.start import weights_identity
from trainer.interop.stored import require_fit
from trainer.interop.torch_file import read_torch_file

_log = logging.getLogger(__name__)

_SHARDS = ("pytorch_model_fsdp_0", "optimizer_0")  # FSDP's folders, each a DCP folder
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_ADAPTERS, _ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
# PEFT's settings that `LoraConfig` has or that need not be equal, and values of others beside those that are falsy.
_LORA = """
    auto_mapping base_model_name_or_path fan_in_fan_out inference_mode lora_alpha lora_dropout megatron_core
    peft_version qalora_group_size r revision target_modules task_type
""".split()  # noqa: SIM905
_PLAIN = [("peft_type", "LORA"), ("bias", "none"), ("init_lora_weights", True), ("init_lora_weights", "gaussian")]
# Unsupported forms: a file pattern, the file that can replace it, and the advice.
_UNREAD = (
    (
        "pytorch_model_fsdp_*rank*.bin",
        SINGLE,
        "Resume there on the same number of ranks, and save with fsdp_state_dict_type SHARDED_STATE_DICT.",
    ),
    (
        "pytorch_model_fsdp.bin",
        SINGLE,
        "Write its weights beside it, `model.save_pretrained(FOLDER, state_dict=torch.load(FILE))`.",
    ),
    ("optimizer.bin", CONFIG, "Write the model's configuration beside it, `model.config.save_pretrained(FOLDER)`."),
)


def read_source(path: Path, options: ImportOptions) -> StateSource:
    """Open a `checkpoint-N`: weights or PEFT's adapters, AdamW's moments and steps, and its run's settings and log.

    FSDP folders are read as DCP, and DeepSpeed folders as universal checkpoints. The base of adapters is a transformers
    folder: `checkpoint.base`, or the one that PEFT loaded.

    Raises:
        ConfigError: Moments are requested, but pickles are not trusted. The files are pickles, although their code is
            never run.
        CheckpointError: Files are missing or damaged.
        MismatchError: The model, optimizer or form is not supported. For a form, the error has the conversion command.
    """
    for pattern, stand_in, fix in _UNREAD:
        if (files := matching(path, pattern)) and not is_file(path / stand_in):
            raise MismatchError("The Trainer checkpoint has an unsupported form", where=files[0], fix=fix)
    if not options.weights_only:
        require_trust(options, "The Trainer", where=path)
    source, groups = _open(path, options)
    return source if options.weights_only else with_settings(source, path, groups)


def _open(path: Path, options: ImportOptions) -> tuple[StateSource, Sequence[Table]]:
    """Return the tensors, and a numbered optimizer's parameter groups."""
    if any(is_dir(child) for child in matching(path, "global_step[0-9]*")):
        return deepspeed.read_source(path, options), ()
    if is_dir(path / _SHARDS[0]):
        shards = [dcp_folder.open_folder(path / name, options) for name in _SHARDS if is_dir(path / name)]
        tensors = {key: tensor for shard in shards for key, tensor in shard.tensors.items()}
        values = {key: value for shard in shards for key, value in shard.values.items()}
        return dcp.source_of(dcp_folder.DcpFolder(path, tensors, values), options), ()
    has_adapters = is_file(path / _ADAPTERS) and not is_file(path / CONFIG)
    source = _adapters(path, options) if has_adapters else weights_source(open_folder(path))
    file = next((path / name for name in _OPTIMIZERS if is_file(path / name)), None)
    if options.weights_only or file is None:
        require_moments([STATE], options, where=path)
        return source, ()
    optimizer = read_torch_file(file)
    frozen = frozen_names(source.model, options.config.train.freeze)
    shapes = {name: stored.shape for name, stored in saved_tensors(source.model).items() if name not in frozen}
    entries = _entries(optimizer, shapes, where=file)
    step = common_step(entry.get(STEP) for entry in entries.values()) or 0.0
    read = by_kind(source.read, lambda kind, name: entries[name][kind], lambda _: step)
    return replace(source, iteration=int(step), has_optimizer=True, read=read), optimizer["param_groups"]


def _adapters(path: Path, options: ImportOptions) -> StateSource:
    """Return PEFT's adapters as a source, which names their base.

    Raises:
        MismatchError: They have settings that ours lack, or their base is not there.
    """
    table = json_file.read(path / _ADAPTERS)
    base = options.config.checkpoint.base or table.get("base_model_name_or_path")
    settings = [item for item in table.items() if item[1] and item[0] not in _LORA and item not in _PLAIN]
    if settings:
        raise MismatchError(
            "The adapters have unsupported settings",
            where=path / _ADAPTERS,
            found=few(f"{name}={shown(value)}" for name, value in settings),
            fix="Merge them in PEFT, `model.merge_and_unload().save_pretrained(FOLDER)`, and import that as `hf`.",
        )
    if not base or not is_folder(Path(base)):
        raise MismatchError(
            "The base of the adapters is not a folder of transformers",
            where=path / _ADAPTERS,
            found=shown(base),
            fix="Set checkpoint.base to the folder that they were trained on.",
        )
    tensors, targets = mapped(path / _ADAPTER_TENSORS), table["target_modules"]
    if isinstance(targets, str):  # a regular expression, whose modules the tensors tell
        targets = [name.removeprefix(PREFIX).removesuffix(A) for name in tensors if name.endswith(A)]
    alpha, dropout = (finite_number(table[name]) for name in ("lora_alpha", "lora_dropout"))
    lora = LoraConfig(integer(table["r"]), alpha, dropout, list(targets))
    weights = open_folder(Path(base))
    model = replace(weights.model, lora=lora)
    shapes = {name: stored.shape for name, stored in adapter_tensors(model).items()}
    require_fit(tensors, shapes, where=path / _ADAPTER_TENSORS)
    return StateSource(model, 0, False, tensors.__getitem__, tokenizer_files_in(path), base=weights_identity(weights))


def _entries(optimizer: Table, shapes: Mapping[str, Sequence[int]], *, where: Path) -> Mapping[str, Table]:
    """Return each parameter's optimizer state.

    In a numbered optimizer, parameters without weight decay come last: in the Trainer all but the matrices, in
    accelerate loops the biases or none.
    """
    orders = [
        [[name for name in shapes if name not in last], last]
        for last in (
            [name for name in shapes if len(shapes[name]) < 2],
            [name for name in shapes if name.endswith(".bias")],
            [],
        )
    ]
    entries = entries_by_name(optimizer, orders, shapes, program="the Trainer", where=where)
    if sum(len(group["params"]) for group in optimizer["param_groups"] if group["weight_decay"]) > len(orders[0][0]):
        _log.warning("the optimizer there decays more parameters; here only the matrices are decayed")
    return entries


FORMAT = Format(
    "transformers' Trainer",
    "a checkpoint-N from transformers' Trainer, of a model or of PEFT's LoRA, or a folder from accelerate's save_state",
    read_source,
    trainer_export.write,
    has_dtypes=True,
)
