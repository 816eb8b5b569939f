"""Reads DeepSpeed's universal checkpoints, without DeepSpeed: a folder per parameter, with its moments.

DeepSpeed's `checkpoint/ds_to_universal.py` converts `save_checkpoint` folders from any ZeRO stage and rank count. In
`zero/NAME/`, each of `fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt` contains a full tensor, beside `step.pt`. At stage 3
the tensors are flat, and only `zero/optimizer_state.pt` has the steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path

import torch

from models.config import ModelConfig
from models.families import aliases, stored_tensors
from reprise.errors import CheckpointError, MismatchError, count_of
from reprise.storage import integer, is_dir, is_file, is_file_name, matching, shown
from trainer.interop.formats import Format, ImportOptions, common_step, few, require_trust, steps_of
from trainer.interop.hf.folder import model_beside
from trainer.interop.masters import checked_master
from trainer.interop.source import MOMENTS, STEP, StateSource, by_kind
from trainer.interop.stored import Shape, require_fit
from trainer.interop.torch_file import is_plain, read_torch_file

_log = logging.getLogger(__name__)

_WEIGHTS = "fp32"
_ZERO, _OPTIMIZER = "zero", "optimizer_state.pt"
_LATEST = ("latest_universal", "latest")
_MODEL = "*mp_rank_00_model_states.pt"
_MIXED = (
    "With round_robin_gradients, ds_to_universal.py mixes up parameters: load the checkpoint in DeepSpeed without that "
    "option, and save it again. Otherwise the files come from different saves."
)
_COMMAND = "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state"


_FIX = (
    "Set its model with overrides, such as model=gpt2_124m or model.tie_word_embeddings=false; a config.json beside "
    "the tag folder takes precedence."
)


def read_source(path: Path, options: ImportOptions) -> StateSource:
    """Open a universal checkpoint whose tensors have transformers' names, optionally with a common prefix.

    The `config.json` written by transformers' Trainer beside the tag folder describes the model. Without it, the
    configuration does. Each file is opened when its tensor is read.

    Args:
        path: A tag folder, or its parent, whose `latest_universal` file names the tag.

    Raises:
        ConfigError: Pickles are not trusted. The files are pickles, although their code is never run.
        CheckpointError: Files are missing or damaged.
        MismatchError: The checkpoint holds another model, or `path` is a plain `save_checkpoint` folder.
    """
    require_trust(options, "DeepSpeed", where=path)
    folder = _tag(path)
    files, zero = sorted(matching(folder, _MODEL)), folder / _ZERO
    if not files:
        raise CheckpointError("A universal checkpoint has no model file", where=folder, expected=_MODEL)
    saved = read_torch_file(files[0])
    kinds = {child.name: {f.stem for f in matching(child, "*.pt")} for child in sorted(zero.iterdir()) if is_dir(child)}
    model = model_beside(folder.parent, options.config.model)
    names, stored = _names(kinds, model, where=folder), stored_tensors(model)
    trained = {name for name, origin in names.items() if kinds[origin] >= {*MOMENTS}}
    # The model's own weights in its dtype. There are none at stage 3.
    module = {name: w for name, w in (saved.get("module") or {}).items() if is_plain(w) and w.numel()}

    def weight(name: str) -> torch.Tensor:
        place, parameter = zero / names[name], module.get(names[name])
        read = partial(_tensor, place, _WEIGHTS, stored[name].shape)
        return read() if parameter is None else checked_master(lambda: parameter, read, where=place, fix=_MIXED)

    if options.weights_only:
        return StateSource(model, 0, has_optimizer=False, read=weight)
    if not trained:
        raise MismatchError(
            "A universal checkpoint has no Adam moments",
            where=zero,
            expected=" and ".join(f"{kind}.pt" for kind in MOMENTS),
            fix="Import the weights alone with --weights-only.",
        )
    table = read_torch_file(zero / _OPTIMIZER)
    common = common_step([*steps_of(table), *steps_of(table.get("optimizer_state_dict"))])
    if frozen := names.keys() - trained:
        _log.warning(f"the moments of {count_of(len(frozen), 'frozen parameter')} start as zeros: {few(frozen)}")

    def moment(kind: str, name: str) -> torch.Tensor:
        shape = stored[name].shape
        return _tensor(zero / names[name], kind, shape) if name in trained else torch.zeros(shape)

    def steps(name: str) -> float | None:
        file = zero / names[name] / f"{STEP}.pt"
        has_own = common is None or is_file(file)
        return common_step([read_torch_file(file) if has_own else common]) if name in trained else 0.0

    iteration, samples = integer(saved.get("global_steps")), integer(saved["global_samples"])
    read = by_kind(weight, moment, steps)
    return StateSource(model, iteration, has_optimizer=True, read=read, consumed_samples=samples)


def _tensor(folder: Path, kind: str, shape: Shape) -> torch.Tensor:
    """Return one of a parameter's tensors, which may be flat."""
    content = read_torch_file(folder / f"{kind}.pt")
    tensor = content.get("param") if isinstance(content, Mapping) else content
    if not is_plain(tensor) or tuple(tensor.shape) not in (shape, (prod(shape),)):
        raise MismatchError(
            "The universal checkpoint holds a different model",
            where=folder / f"{kind}.pt",
            expected=list(shape),
            found=list(tensor.shape) if isinstance(tensor, torch.Tensor) else shown(tensor),
            fix=_FIX,
        )
    return tensor.detach().reshape(shape)


def _tag(path: Path) -> Path:
    """Return the requested tag's folder.

    Raises:
        CheckpointError: The folder does not exist.
        MismatchError: The folder is not a universal checkpoint.
    """
    folder = path
    if latest := next((path / name for name in _LATEST if is_file(path / name)), None):
        tag = latest.read_bytes()[:1000].decode("utf-8", "replace").strip()
        if not is_file_name(tag) or not is_dir(path / tag):
            raise CheckpointError("A folder's newest tag does not exist", where=latest, found=shown(tag))
        folder = path / tag
    if not is_dir(folder / _ZERO):
        raise MismatchError(
            "A folder is not a DeepSpeed universal checkpoint",
            where=folder,
            expected=f"a folder {_ZERO} with one folder per parameter",
            found=few(child.name for child in folder.iterdir()),
            fix=f"Where DeepSpeed is installed, run `{_COMMAND} --input_folder {folder} --output_folder "
            f"{folder}_universal`, and import its output. For the weights alone, import a save_pretrained folder as "
            "`hf`.",
        )
    return folder


def _names(kinds: Mapping[str, set[str]], model: ModelConfig, *, where: Path) -> dict[str, str]:
    """Map our tensor names to DeepSpeed's.

    A parameter without moments is frozen, a buffer, or another parameter's second name.
    """
    stored, second = list(stored_tensors(model)), aliases(model)
    prefix = next((name.removesuffix(stored[0]) for name in kinds if name.endswith(stored[0])), "")
    names = {name: prefix + name for name in stored}
    problems = [f"missing: {name}/{_WEIGHTS}.pt" for name in names.values() if _WEIGHTS not in kinds.get(name, ())]
    problems += [f"{name}: one of two moments" for name, files in kinds.items() if len(files & {*MOMENTS}) == 1]
    for name in sorted(kinds.keys() - names.values() - {prefix + name for name in second}):
        if name.endswith(".weight") or kinds[name] & {*MOMENTS}:
            problems.append(f"not of the model: {name}")
    require_fit({}, {}, where=where, fix=_FIX, differences=problems)
    return names


FORMAT = Format("DeepSpeed", "a DeepSpeed universal checkpoint, as written by ds_to_universal.py", read_source)
