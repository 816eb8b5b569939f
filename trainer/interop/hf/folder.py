"""Opens a transformers folder: its model, and its tensors, mapped by safetensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from models import families
from models.config import ModelConfig
from reprise.errors import CheckpointError, MismatchError
from reprise.format import INDEX
from reprise.storage import Json, exists, is_file, json_file, matching, shown
from trainer.data.tokenizer_beside import tokenizer_files_in
from trainer.interop.formats import few
from trainer.interop.hf.config import CONFIG, is_folder, read_folder_model, require_layers
from trainer.interop.pointers import refuse_pointers
from trainer.interop.source import StateSource
from trainer.interop.stored import require_fit

_log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
SHARDS = "shard-*-model-*-of-*.safetensors"  # of `save_pretrained(distributed_checkpoint=True)`
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Buffers stored by older transformers versions, which the sizes determine: GPT-2's masks, LLaMA's frequencies.
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_ITEMS = 1 << 20  # elements compared at once
# Files that transformers' Trainer, accelerate and DeepSpeed write beside a model.
_BESIDE = """
    optimizer.pt optimizer.bin optimizer optimizer_[0-9]* scheduler.pt scheduler.bin trainer_state.json rng_state*.pth
    random_states_*.pkl training_args.bin scaler.pt sampler*.bin dl_state_dict.bin global_step[0-9]*
""".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class HfFolder:
    """A folder with validated JSON files and headers.

    Args:
        lost: A log line per JSON file with settings missing from `model`.
        tensors: Views of the mapped files, by stored name.
        files: Each tensor's file path.
    """

    path: Path
    model: ModelConfig
    lost: Sequence[str]
    tensors: Mapping[str, torch.Tensor]
    files: Mapping[str, Path]


def trainer_checkpoints(path: Path) -> list[str]:
    """Return the names of model folders in transformers' Trainer's output folder, oldest first."""
    folders = [child for child in matching(path, "checkpoint-[0-9]*") if is_folder(child)]
    return sorted((folder.name for folder in folders), key=lambda name: (len(name), name))


def no_folder(path: Path) -> CheckpointError:
    """Return an error for a folder without a model, suggesting the newest Trainer checkpoint in it."""
    saved = trainer_checkpoints(path)
    return CheckpointError(
        "The folder is not a transformers model folder",
        where=path,
        expected=f"{CONFIG} in it",
        found=f"the Trainer's checkpoints in it: {', '.join(saved)}" if saved else None,
        fix=f"Pass the newest, {path / saved[-1]}." if saved else None,
    )


def model_beside(folder: Path, tensors: int, configured: ModelConfig) -> ModelConfig:
    """Return the model in a `config.json` beside another program's tensors, or the configured model.

    Args:
        tensors: Tensor count. A model with more layers is refused.
    """
    if not is_file(folder / CONFIG):
        return configured
    _log.info(f"the model comes from {folder / CONFIG}")
    model, lost = read_folder_model(folder)
    for line in lost:
        _log.warning(line)
    require_layers(model, tensors, where=folder / CONFIG)
    return model


def open_folder(path: Path) -> HfFolder:
    """Read the configuration and every safetensors header. Links are followed, because caches use them.

    It opens the same files as transformers. A warning names other weight files in the folder.

    Raises:
        MismatchError: The model is not supported.
        CheckpointError: Files are missing, pickled or malformed.
    """
    if not is_file(path / CONFIG):
        raise no_folder(path)
    table = json_file.read(path / CONFIG)
    refuse_pointers(path)
    model, lost = read_folder_model(path)
    index = path / _weights_name(path, table)
    weight_map = _weight_map(index) if index.suffix == ".json" else {}
    tensors, files = dict[str, torch.Tensor](), dict[str, Path]()
    for file in sorted({path / name for name in weight_map.values()} or {index}):
        for name, tensor in mapped(file).items():
            if name in tensors:
                raise CheckpointError("A tensor is stored in two files", where=file, found=name)
            tensors[name], files[name] = tensor, file
    for name, file_name in weight_map.items():
        if files.get(name) != path / file_name:
            expected = f"{name} in {file_name}"
            raise CheckpointError("A tensor is not in the file listed in the index", where=index, expected=expected)
    require_layers(model, len(tensors), where=path / CONFIG)
    # A model without a head stores its tensors without the prefix that the head adds.
    prefixed = {name.split(".", 1)[1]: name for name in families.stored_tensors(model) if name not in tensors}
    for name in tensors.keys() & prefixed.keys():
        tensors[prefixed[name]], files[prefixed[name]] = tensors.pop(name), files.pop(name)
    return HfFolder(path, model, lost, tensors, files)


def other_files_notes(path: Path) -> list[str]:
    """Return log lines on a trainer's other files in the folder, which are ignored when loading weights."""
    names = [child.name for pattern in _BESIDE for child in matching(path, pattern)]
    note = (
        f"not carried from {path}: {few(names)}; the run starts with only the weights, at iteration 0 with zero "
        "moments; `reprise convert import trainer` imports the rest"
    )
    return [note] if names else []


def stored_tensors(
    folder: HfFolder, model: ModelConfig, selects: Callable[[str], bool] = lambda _: True
) -> dict[str, torch.Tensor]:
    """Return every selected stored tensor of `model`, by our name, as a view into its file.

    A tied output layer's stored copy, older versions' buffers, and vocabulary padding rows are left out.

    Args:
        selects: Whether a tensor is needed, by our name. If any is not needed, the folder may contain unexpected
            tensors.

    Raises:
        MismatchError: Tensors are missing, unexpected, or have another shape or dtype. The error lists them.
    """
    stored, aliases = families.stored_tensors(model), families.aliases(model)
    prefix = next(iter(stored)).split(".")[0] + "."
    selected = {name: tensor.shape for name, tensor in stored.items() if selects(name)}
    tensors = dict(folder.tensors)
    for name in selected.keys() & tensors.keys():
        rows, is_table = (*tensors[name].shape, 0)[0], selected[name] == (model.vocab_size, model.n_embd)
        if is_table and rows == model.padded_vocab_size == folder.model.vocab_size:
            tensors[name] = tensors[name][: model.vocab_size]

    def is_allowed(name: str) -> bool:
        return len(selected) < len(stored) or name in aliases or bool(_BUFFERS.fullmatch(name.removeprefix(prefix)))

    require_fit(tensors, selected, is_allowed, where=folder.path)
    return {name: tensors[name] for name in selected}


def folder_source(folder: HfFolder) -> StateSource:
    """Return a folder's weights as a source, and log settings missing from the model.

    Raises:
        MismatchError: The folder's tensors do not match its model.
    """
    for line in folder.lost:
        _log.warning(line)
    tensors = stored_tensors(folder, folder.model)
    check_tied(folder, folder.model)
    return StateSource(folder.model, 0, False, tensors.__getitem__, tokenizer_files_in(folder.path))


def check_tied(folder: HfFolder, model: ModelConfig) -> None:
    """Refuse a stored output layer unequal, bit for bit as float32, to its tied embedding.

    Raises:
        MismatchError: They differ.
    """
    for alias, name in families.aliases(model).items():
        if alias not in folder.tensors:
            continue
        pair = folder.tensors[name], folder.tensors[alias]
        parts = zip(*(torch.split(tensor.reshape(-1), _ITEMS) for tensor in pair), strict=False)
        if pair[0].shape != pair[1].shape or not all(torch.equal(*map(_bits, halves)) for halves in parts):
            raise MismatchError(
                "Tied parameters differ in the folder",
                where=folder.path,
                expected=f"{alias} and {name} with identical values",
                fix="Set tie_word_embeddings to false in its config.json, and set model.tie_word_embeddings=false.",
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().view(torch.int32)


def _weights_name(path: Path, table: Json) -> str:
    """Return the file that transformers opens: the file named by `transformers_weights`, a single file, or an index.

    Source: `PreTrainedModel.from_pretrained` and `_get_resolved_checkpoint_files`, transformers 5.23.

    Args:
        table: The content of `config.json`.
    """
    if shards := matching(path, SHARDS):
        raise CheckpointError(
            "The folder holds each rank's tensor parts, which transformers opens before any other file",
            where=shards[0],
            fix=f"Import it: reprise convert import dcp {path} RUN/checkpoints.",
        )
    names = [name for name in (SINGLE, INDEX) if is_file(path / name)]
    first = table.get("transformers_weights")
    if first is not None:
        if not isinstance(first, str) or not re.fullmatch(r"[^/]+\.safetensors(\.index\.json)?", first):
            raise CheckpointError(
                "A config.json names weights that are not safetensors files in its folder",
                where=f"{path / CONFIG}, transformers_weights",
                found=shown(first),
            )
        names = [first, *(name for name in names if name != first)]
    if not names:
        raise _no_tensors(path)
    for name in names[1:]:
        _log.warning(f"not used: {path / name}; the weights are those of {names[0]}, which transformers opens")
    return names[0]


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


def _no_tensors(path: Path) -> CheckpointError:
    pickled = [name for name in _PICKLED if exists(path / name)]
    if not pickled:
        return CheckpointError(
            "A folder holds no tensors", where=path, expected=f"{SINGLE} or {INDEX}", fix="Pass another folder."
        )
    return CheckpointError(
        "The folder holds only pickled tensors, and loading a pickle can run code",
        where=path / pickled[0],
        expected=f"{SINGLE} or {INDEX}",
        fix="If you trust it, load it in transformers and save_pretrained(folder, safe_serialization=True).",
    )


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
