"""Opens a transformers folder: its model, and its tensors, mapped by safetensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from models import families
from models.config import ModelConfig
from reprise.errors import CheckpointError
from reprise.format import INDEX
from reprise.storage import is_file, json_file, matching, shown
from trainer.data.tokenizer_beside import tokenizer_files_in
from trainer.interop.formats import few
from trainer.interop.hf.config import CONFIG, read_folder_model
from trainer.interop.pointers import refuse_pointers
from trainer.interop.source import StateSource
from trainer.interop.stored import FileTensor, ForeignWeights, require_fit, require_tied

_log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
SHARDS = "shard-*-model-*-of-*.safetensors"  # of `save_pretrained(distributed_checkpoint=True)`
# Buffers stored by older transformers versions, which the sizes determine: GPT-2's masks, LLaMA's frequencies.
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# Files that transformers' Trainer, accelerate and DeepSpeed write beside a model.
_BESIDE = """
    optimizer.pt optimizer.bin optimizer optimizer_[0-9]* scheduler.pt scheduler.bin trainer_state.json rng_state*.pth
    random_states_*.pkl training_args.bin scaler.pt sampler*.bin dl_state_dict.bin global_step[0-9]*
""".split()  # noqa: SIM905


def model_beside(folder: Path, configured: ModelConfig) -> ModelConfig:
    """Return the model in a `config.json` beside another program's tensors, or the configured model."""
    if not is_file(folder / CONFIG):
        return configured
    _log.info(f"the model comes from {folder / CONFIG}")
    model, lost = read_folder_model(folder)
    for line in lost:
        _log.warning(line)
    return model


def open_folder(path: Path) -> ForeignWeights:
    """Read the configuration and every safetensors header. Links are followed, because caches use them.

    Of a single file and an index, the file wins, as in transformers.

    Raises:
        MismatchError: The model is not supported.
        CheckpointError: Files are missing, pickled or malformed.
    """
    if not is_file(path / CONFIG):
        raise CheckpointError("The folder is not a transformers model folder", where=path, expected=f"{CONFIG} in it")
    refuse_pointers(path)
    model, lost = read_folder_model(path)
    index = path / _weights_name(path)
    weight_map = _weight_map(index) if index.suffix == ".json" else {}
    tensors, files = dict[str, FileTensor](), dict[str, Path]()
    for file in sorted({path / name for name in weight_map.values()} or {index}):
        for name, tensor in mapped(file).items():
            if name in tensors:
                raise CheckpointError("A tensor is stored in two files", where=file, found=name)
            tensors[name], files[name] = FileTensor.of(tensor), file
    for name, file_name in weight_map.items():
        if files.get(name) != path / file_name:
            expected = f"{name} in {file_name}"
            raise CheckpointError("A tensor is not in the file listed in the index", where=index, expected=expected)
    # A model without a head stores its tensors without the prefix that the head adds.
    prefixed = {name.split(".", 1)[1]: name for name in families.stored_tensors(model) if name not in tensors}
    for name in tensors.keys() & prefixed.keys():
        tensors[prefixed[name]], files[prefixed[name]] = tensors.pop(name), files.pop(name)
    return ForeignWeights(path, model, tensors, files, lost)


def other_files_notes(path: Path) -> list[str]:
    """Return log lines on a trainer's other files in the folder, which are ignored when loading weights."""
    names = [child.name for pattern in _BESIDE for child in matching(path, pattern)]
    note = (
        f"not carried from {path}: {few(names)}; the run starts with only the weights, at iteration 0 with zero "
        "moments; `reprise convert import trainer` imports the rest"
    )
    return [note] if names else []


def stored_tensors(weights: ForeignWeights, model: ModelConfig) -> dict[str, FileTensor]:
    """Return every stored tensor of `model`, by our name.

    A tied output layer's stored copy, older versions' buffers, and vocabulary padding rows are left out.

    Raises:
        MismatchError: Tensors are missing, unexpected, or have another shape or dtype. The error lists them.
    """
    stored, aliases = families.stored_tensors(model), families.aliases(model)
    prefix = next(iter(stored)).split(".")[0] + "."
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    tensors, rows = dict(weights.tensors), model.padded_vocab_size
    for name in shapes.keys() & tensors.keys():
        is_table = shapes[name] == (model.vocab_size, model.n_embd)
        if is_table and tensors[name].shape[:1] == (rows,) and weights.model.vocab_size == rows:
            tensors[name] = tensors[name].head(model.vocab_size)

    def is_allowed(name: str) -> bool:
        return name in aliases or bool(_BUFFERS.fullmatch(name.removeprefix(prefix)))

    require_fit(tensors, shapes, is_allowed, where=weights.path)
    return {name: tensors[name] for name in shapes}


def weights_source(weights: ForeignWeights) -> StateSource:
    """Return weights as a source, and log their notes.

    Raises:
        MismatchError: The tensors do not match the model.
    """
    for line in weights.notes:
        _log.warning(line)
    tensors = stored_tensors(weights, weights.model)
    check_tied(weights, weights.model)
    return StateSource(weights.model, 0, False, lambda name: tensors[name].read(), tokenizer_files_in(weights.path))


def check_tied(weights: ForeignWeights, model: ModelConfig) -> None:
    """Refuse a stored output layer that differs from its tied embedding.

    Raises:
        MismatchError: They differ.
    """
    for alias, name in families.aliases(model).items():
        if alias in weights.tensors:
            pair = weights.tensors[name].read(), weights.tensors[alias].read()
            require_tied(*pair, where=f"{weights.path}, {name} and {alias}")


def _weights_name(path: Path) -> str:
    """Return the file that transformers opens: a single file, or else an index.

    Source: `_get_resolved_checkpoint_files`, transformers 5.23.
    """
    if shards := matching(path, SHARDS):
        raise CheckpointError(
            "The folder holds each rank's tensor parts, which transformers opens before any other file",
            where=shards[0],
            fix=f"Import it: reprise convert import dcp {path} RUN/checkpoints.",
        )
    name = next((name for name in (SINGLE, INDEX) if is_file(path / name)), None)
    if name is None:
        raise CheckpointError(
            "A folder holds no safetensors files",
            where=path,
            expected=f"{SINGLE} or {INDEX}",
            found=few(child.name for child in path.iterdir()),
            fix="Loading pickled tensors can run code: if you trust them, load them in transformers and "
            "save_pretrained(folder, safe_serialization=True).",
        )
    return name


def _weight_map(index: Path) -> dict[str, str]:
    table = json_file.read(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError("The index has no weight_map", where=index, found=shown(table))
    for name, file in table.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                "The index names a file that is not a safetensors file",
                where=f"{index}, {name}",
                found=shown(file),
            )
    return table


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Yield a safetensors file.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    if not is_file(file):
        raise CheckpointError("A file is missing", where=file)
    try:
        with safe_open(file, "pt") as content:
            yield content
    except (OSError, SafetensorError) as error:
        raise CheckpointError("A safetensors file cannot be read", where=file, found=str(error)) from error


def mapped(file: Path) -> dict[str, torch.Tensor]:
    """Return a safetensors file's tensors, as views of the mapped file. See `opened`."""
    with opened(file) as content:
        return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
