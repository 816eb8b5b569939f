"""Reads DeepSpeed's universal checkpoints, without DeepSpeed: a folder per parameter, with its moments.

DeepSpeed's `checkpoint/ds_to_universal.py` converts `save_checkpoint` folders from any ZeRO stage and rank count. In
`zero/NAME/`, each of `fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt` contains a full tensor, beside `step.pt`. At stage 3
the tensors are flat, and only `zero/optimizer_state.pt` has the steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from models.config import ModelConfig
from models.families import aliases, stored_tensors
from reprise.errors import CheckpointError, MismatchError, count_of
from reprise.loading import no_folder
from reprise.storage import integer, is_dir, is_file, is_file_name, matching, shown
from trainer.interop.finite import require_finite
from trainer.interop.formats import Format, ImportOptions, common_step, few, require_trust
from trainer.interop.hf.folder import model_beside
from trainer.interop.source import StateSource
from trainer.interop.stored import require_none
from trainer.interop.torch_file import is_plain, open_torch_file, read_torch_file

_log = logging.getLogger(__name__)

_WEIGHTS, _MOMENTS, _STEP = "fp32", ("exp_avg", "exp_avg_sq"), "step"
_ZERO, _OPTIMIZER = "zero", "optimizer_state.pt"
_LATEST = ("latest_universal", "latest")
_MODEL = "*mp_rank_00_model_states.pt"
_COMMAND = "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state"


@dataclass(frozen=True, slots=True)
class _Universal:
    """A universal checkpoint.

    Args:
        names: DeepSpeed's name for each tensor, by our name.
        trained: Our names for parameters with moments.
        module: The model's own weights in its dtype, by DeepSpeed's names. Empty at stage 3.
        step: Step count for parameters without a `step.pt`. None if no file has it.
    """

    path: Path
    model: ModelConfig
    names: Mapping[str, str]
    trained: frozenset[str]
    module: Mapping[str, torch.Tensor]
    step: float | None = None

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor. A frozen parameter has zero moments and step 0."""
        kind, _, parameter = name.partition(".")
        if kind == _STEP:
            return torch.tensor(self._steps(parameter))
        if kind not in _MOMENTS:
            return self._tensor(_WEIGHTS, name)
        if parameter not in self.trained:
            return torch.zeros(stored_tensors(self.model)[parameter].shape)
        return self._tensor(kind, parameter)

    def _steps(self, parameter: str) -> float:
        if parameter not in self.trained:
            return 0.0
        file = self.path / _ZERO / self.names[parameter] / f"{_STEP}.pt"
        step = common_step([read_torch_file(file)], where=file) if is_file(file) else self.step
        if step is None:
            raise CheckpointError("A parameter's step count is missing", where=file)
        return step

    def _tensor(self, kind: str, name: str) -> torch.Tensor:
        file, shape = self.path / _ZERO / self.names[name] / f"{kind}.pt", stored_tensors(self.model)[name].shape
        content = read_torch_file(file)
        tensor = content.get("param") if isinstance(content, Mapping) else content
        if not is_plain(tensor) or tuple(tensor.shape) not in (shape, (prod(shape),)):
            raise MismatchError(
                "The universal checkpoint holds a different model",
                where=file,
                expected=list(shape),
                found=list(tensor.shape) if isinstance(tensor, torch.Tensor) else shown(tensor),
                fix=_FIX,
            )
        values, weight = tensor.detach().reshape(shape), self.module.get(self.names[name])
        if kind == _WEIGHTS and weight is not None and not torch.equal(values.to(weight.dtype), weight):
            require_finite(values, where=name)  # NaN is never equal to itself
            raise CheckpointError(
                "The optimizer's copy of a parameter differs from the model's",
                where=file,
                fix="With round_robin_gradients, ds_to_universal.py mixes up parameters: load the checkpoint in "
                "DeepSpeed without that option, and save it again. Otherwise the files come from different saves.",
            )
        return values


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
    saved = _model_file(folder)
    module = {name: w for name, w in (saved.get("module") or {}).items() if is_plain(w) and w.numel()}
    kinds = {name: {file.stem for file in matching(folder / _ZERO / name, "*.pt")} for name in _parameters(folder)}
    model = model_beside(folder.parent, len(kinds), options.config.model)
    names = _names(kinds, model, where=folder)
    trained = frozenset(name for name, origin in names.items() if kinds[origin] >= {*_MOMENTS})
    frozen = names.keys() - trained
    universal = _Universal(folder, model, names, trained, module)
    if options.weights_only:
        return StateSource(model, 0, has_optimizer=False, read=universal.read)
    if not trained:
        raise MismatchError(
            "A universal checkpoint has no Adam moments",
            where=folder / _ZERO,
            expected=" and ".join(f"{kind}.pt" for kind in _MOMENTS),
            fix="Import the weights alone with --weights-only.",
        )
    iteration, step = integer(saved.get("global_steps")), _common_step(folder)
    if frozen:
        _log.warning(f"the moments of {count_of(len(frozen), 'frozen parameter')} start as zeros: {few(frozen)}")
    read, samples = replace(universal, step=step).read, integer(saved["global_samples"])
    return StateSource(model, iteration, has_optimizer=True, read=read, consumed_samples=samples)


def _tag(path: Path) -> Path:
    """Return the requested tag's folder.

    Raises:
        CheckpointError: The folder does not exist.
        MismatchError: The folder is not a universal checkpoint.
    """
    if not is_dir(path):
        raise no_folder(path)
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


def _model_file(folder: Path) -> Mapping[Any, Any]:
    """Return the first model file's content, which includes the counts."""
    file = next(iter(sorted(matching(folder, _MODEL))), None)
    if file is None:
        raise CheckpointError("A universal checkpoint has no model file", where=folder, expected=_MODEL)
    return open_torch_file(file)


def _parameters(folder: Path) -> list[str]:
    return sorted(child.name for child in (folder / _ZERO).iterdir() if is_dir(child))


def _names(kinds: Mapping[str, set[str]], model: ModelConfig, *, where: Path) -> dict[str, str]:
    """Map our tensor names to DeepSpeed's.

    A parameter without moments is frozen, a buffer, or another parameter's second name.
    """
    stored, second = list(stored_tensors(model)), aliases(model)
    prefix = next((name.removesuffix(stored[0]) for name in kinds if name.endswith(stored[0])), "")
    names = {name: prefix + name for name in stored}
    problems = [f"missing: {name}/{_WEIGHTS}.pt" for name in names.values() if _WEIGHTS not in kinds.get(name, ())]
    problems += [f"{name}: one of two moments" for name, files in kinds.items() if len(files & {*_MOMENTS}) == 1]
    strangers = kinds.keys() - names.values() - {prefix + name for name in second}
    strangers = {name for name in strangers if name.endswith(".weight") or kinds[name] & {*_MOMENTS}}
    require_none([*problems, *(f"not of the model: {name}" for name in sorted(strangers))], where=where, fix=_FIX)
    return names


def _common_step(folder: Path) -> float | None:
    """Return the step count in the optimizer's unsharded state, shared by all parameters."""
    file = folder / _ZERO / _OPTIMIZER
    table = open_torch_file(file)
    state = (table.get("optimizer_state_dict") or {}).get("state") or {}
    return common_step(
        [entry.get(_STEP) for entry in (*(table.get("param_groups") or ()), *state.values())], where=file
    )


FORMAT = Format("DeepSpeed", "a DeepSpeed universal checkpoint, as written by ds_to_universal.py", read_source)
