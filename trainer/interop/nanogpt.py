"""Imports nanoGPT's `ckpt.pt`: weights, AdamW's moments and steps, without nanoGPT.

Sources: `GPT` and `configure_optimizers` of nanoGPT's `model.py`, and the saving in its `train.py`, all versions up to
commit 3adf61e. The activation is in no file. It follows from the order of the optimizer's parameters, which changed
eleven days before the activation did, in May 2023.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from models.config import Activation, Family, ModelConfig
from models.families import stored_tensors
from models.spec import OUTPUT
from reprise.errors import CheckpointError, ConfigError, MismatchError, count_of
from reprise.files import is_dir
from reprise.json_file import integer, shown, step_count
from reprise.live_tensors import canonical_name
from trainer.config.frozen import frozen_names
from trainer.interop.formats import Format, ImportOptions
from trainer.interop.source import StateSource
from trainer.interop.torch_file import is_plain, open_torch_file

_log = logging.getLogger(__name__)

Table = Mapping[Any, Any]

_MOMENTS, _STEP = ("exp_avg", "exp_avg_sq"), "step"
_EMBEDDING, _POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"
_LAYER = re.compile(r"transformer\.h\.(\d+)\.")
_MASK = re.compile(r"transformer\.h\.\d+\.attn\.bias")
# Ours are transformers' Conv1D, [in, out]; nanoGPT's are Linear, [out, in].
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_ARGUMENTS = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
_END_OF_TEXT = 50256  # of GPT-2's vocabulary, which nanoGPT pads to 50304
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class _Saved:
    """The content of a file.

    Args:
        weights: by their stored names; those of a model without biases lack them.
        numbers: the optimizer's number of each weight; empty without moments.
        state: the optimizer's entries by number.
    """

    path: Path
    model: ModelConfig
    weights: Mapping[str, torch.Tensor]
    numbers: Mapping[str, int] = field(default_factory=dict)
    state: Table = field(default_factory=dict)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in our orientation; missing biases are zero, with zero moments and step 0."""
        key, _, parameter = name.partition(".")
        if key != _STEP and key not in _MOMENTS:
            return self._turned(name, self.weights.get(name))
        if parameter not in self.weights:
            return torch.zeros(() if key == _STEP else stored_tensors(self.model)[parameter].shape)
        entry = self.state[self.numbers[parameter]]
        return torch.tensor(_steps(entry, self.path)) if key == _STEP else self._turned(parameter, entry[key])

    def _turned(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            return torch.zeros(stored_tensors(self.model)[name].shape)
        return tensor.T if name.endswith(_TRANSPOSED) else tensor


def read_source(path: Path, options: ImportOptions) -> StateSource:
    """Open a `ckpt.pt`, or its folder.

    The tensors are mapped; beyond the map, at most one is in memory. A model without biases gets biases of zero, which
    a run trains unless `train.freeze` names them.

    Raises:
        ConfigError: if pickles are not trusted: the file is a pickle, although no code in it is run.
        CheckpointError: if the file is missing or damaged.
        MismatchError: if the model is not nanoGPT's, or its moments cannot be assigned with certainty.
    """
    if not options.trusts_pickle:
        raise ConfigError(
            "nanoGPT's file is a pickle",
            where=path,
            fix="If you know who wrote it, add --trust-pickle: no class in it is imported and no code is run.",
        )
    file = path / "ckpt.pt" if is_dir(path) else path
    table = open_torch_file(file)
    weights = _weights(_table(table, "model", file), file)
    model = _model(_table(table, "model_args", file), weights, where=file)
    _check_model(weights, model, where=file)
    groups = _groups(table, file) if "optimizer" in table or not options.weights_only else []
    order, is_sorted = _order(groups, [name for name in stored_tensors(model) if name in weights], weights)
    if is_sorted:
        model = replace(model, activation=Activation.gelu_tanh)
    saved = _Saved(file, model, weights)
    if not options.weights_only:
        if order is None:
            raise _of_no_order(groups, weights, file)
        numbers = {name: number for number, name in enumerate(order)}
        saved = replace(saved, numbers=numbers, state=_table(table["optimizer"], "state", file))
        _check_moments(saved)
    _log_choices(saved, table, groups, options, is_sorted=is_sorted)
    iteration = 0 if options.weights_only else _iteration(table, file)
    return StateSource(model, iteration, has_optimizer=not options.weights_only, read=saved.read)


def _weights(module: Table, where: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the file's order by name, without names of compilation, masks and a tied output."""
    weights = {canonical_name(str(name)): tensor for name, tensor in module.items()}
    weights = {name: tensor for name, tensor in weights.items() if not _MASK.fullmatch(name)}
    if malformed := [name for name, tensor in weights.items() if not is_plain(tensor)]:
        raise CheckpointError("A weight is no dense tensor of floating point", where=where, found=", ".join(malformed))
    for name in (_EMBEDDING, _POSITIONS):
        if name not in weights or weights[name].dim() != 2:
            raise MismatchError(
                "The file holds no model of nanoGPT",
                where=where,
                expected=f"a matrix {name}",
                found=", ".join(list(weights)[:_MOST_NAMED]),
            )
    output = weights.get(OUTPUT)
    if output is not None and torch.equal(output, weights[_EMBEDDING]):
        del weights[OUTPUT]
    return weights


def _groups(table: Table, where: Path) -> list[Table]:
    optimizer = _table(table, "optimizer", where)
    groups = optimizer.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise _damaged(where, "optimizer.param_groups", f"a {type(groups).__name__}")
    if not all(isinstance(group.get("params"), list) for group in groups):
        raise _damaged(where, "optimizer.param_groups", "a group without parameters")
    numbers = [number for group in groups for number in group["params"]]
    if not all(type(number) is int for number in numbers) or numbers != list(range(len(numbers))):
        raise _damaged(where, "optimizer.param_groups", "numbers that are not in order")
    return groups


def _order(
    groups: Sequence[Table], names: Sequence[str], weights: Mapping[str, torch.Tensor]
) -> tuple[list[str] | None, bool]:
    """Return the optimizer's parameters in its order, None if unknown, and whether the order is the older.

    Until 6 May 2023 the names were sorted, and embeddings did not decay; an untied output layer did.

    Args:
        names: of the weights, in the module's order.
    """
    matrices = [name for name in names if weights[name].dim() >= 2]
    linear = sorted(name for name in matrices if name not in (_EMBEDDING, _POSITIONS))
    counts = [len(group["params"]) for group in groups]
    if counts == [len(matrices), len(names) - len(matrices)]:
        return [*matrices, *(name for name in names if weights[name].dim() < 2)], False
    if counts == [len(linear), len(names) - len(linear)]:
        return [*linear, *sorted(set(names) - set(linear))], True
    return None, False


def _of_no_order(groups: Sequence[Table], weights: Mapping[str, torch.Tensor], where: Path) -> MismatchError:
    matrices = sum(tensor.dim() >= 2 for tensor in weights.values())
    return MismatchError(
        "It is not certain which moments belong to which parameter: nanoGPT keeps them by number",
        where=where,
        expected=f"two groups: {matrices} parameters with decay (or {matrices - 2}, before May 2023) and the other "
        f"{len(weights) - matrices} (or {len(weights) - matrices + 2})",
        found=f"groups of {' and '.join(str(len(group['params'])) for group in groups)}",
        fix="The optimizer is not that of nanoGPT's configure_optimizers. Take the weights alone with --weights-only.",
    )


def _model(arguments: Table, weights: Mapping[str, torch.Tensor], *, where: Path) -> ModelConfig:
    """Return the model, with the sizes of the tensors; `model_args` must not contradict them."""
    if unknown := sorted(set(map(str, arguments)) - _ARGUMENTS):
        raise MismatchError(
            "The model has settings that nanoGPT's own does not have",
            where=f"{where}, model_args",
            expected=", ".join(sorted(_ARGUMENTS)),
            found=", ".join(f"{name}={shown(arguments[name])}" for name in unknown),
            fix="It is of a program derived from nanoGPT, whose model may compute something else: not imported.",
        )
    vocab_size, width = weights[_EMBEDDING].shape
    layers = {match[1] for name in weights if (match := _LAYER.match(name))}
    has_bias = any(name.endswith(".bias") for name in weights)
    positions = len(weights[_POSITIONS])
    tensor_sizes = {"n_layer": len(layers), "n_embd": width, "block_size": positions, "vocab_size": vocab_size}
    sizes = {**tensor_sizes, "bias": has_bias}
    stated = {name: arguments[name] for name in sizes if arguments.get(name) is not None}
    contradictions = [
        f"{name}={shown(value)}, the tensors have {sizes[name]}"
        for name, value in stated.items()
        if not isinstance(value, int) or value != sizes[name]
    ]
    try:
        heads = integer(arguments.get("n_head"))
    except ValueError:
        heads = 0
    if contradictions or heads < 1 or width % heads:
        contradictions += (
            [] if heads >= 1 and not width % heads else [f"n_head={shown(arguments.get('n_head'))} of n_embd={width}"]
        )
        raise CheckpointError(
            "model_args and the tensors are of two models", where=where, found="; ".join(contradictions)
        )
    dropout = arguments.get("dropout", 0.0)
    end = _END_OF_TEXT if vocab_size > _END_OF_TEXT else vocab_size - 1
    return ModelConfig(
        family=Family.gpt2,
        n_layer=len(layers),
        n_head=heads,
        n_kv_head=heads,
        n_embd=width,
        intermediate_size=4 * width,
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        bos_token_id=end,
        eos_token_id=end,
        tie_word_embeddings=OUTPUT not in weights,
        dropout=float(dropout) if isinstance(dropout, int | float) else 0.0,
        activation=Activation.gelu,
    )


def _check_model(weights: Mapping[str, torch.Tensor], model: ModelConfig, *, where: Path) -> None:
    """Refuse missing or unexpected tensors, and other shapes; a model may lack all its biases."""
    expected = stored_tensors(model)
    has_bias = any(name.endswith(".bias") for name in weights)
    problems = [f"missing: {n}" for n in expected if n not in weights and (has_bias or not n.endswith(".bias"))]
    problems += [f"not of the model: {name}" for name in weights if name not in expected]
    for name, tensor in weights.items():
        shape = tuple(reversed(tensor.shape)) if name.endswith(_TRANSPOSED) else tuple(tensor.shape)
        if name in expected and shape != expected[name].shape:
            problems.append(f"{name}: shape {list(tensor.shape)}")
    if problems:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise MismatchError(
            "The file holds another model than nanoGPT's",
            where=where,
            expected=f"n_layer={model.n_layer}, n_embd={model.n_embd}, with an MLP of 4 times the width",
            found=f"{count_of(len(problems), 'difference')}: {'; '.join(problems[:_MOST_NAMED])}{more}",
        )


def _check_moments(saved: _Saved) -> None:
    """Refuse an optimizer without moments of every weight, in its shape, or with several steps."""
    problems, steps = [], set()
    for name, number in saved.numbers.items():
        entry = saved.state.get(number)
        if not isinstance(entry, Mapping) or not all(is_plain(entry.get(key)) for key in _MOMENTS):
            problems.append(f"number {number}, {name}: no {' and '.join(_MOMENTS)}")
            continue
        shapes = {tuple(entry[key].shape) for key in _MOMENTS}
        if shapes != {tuple(saved.weights[name].shape)}:
            problems.append(f"number {number}, {name} is {list(saved.weights[name].shape)}, moments {sorted(shapes)}")
        steps.add(_steps(entry, saved.path))
    if problems:
        raise MismatchError(
            "The optimizer's moments are not those of the model",
            where=saved.path,
            found=f"{count_of(len(problems), 'problem')}: {'; '.join(problems[:_MOST_NAMED])}",
            fix="It was saved before the first step, or by another optimizer than AdamW. Take the weights alone with "
            "--weights-only.",
        )
    if len(steps) > 1:
        raise _damaged(saved.path, "optimizer.state", f"several steps: {sorted(steps)}")


def _steps(entry: Table, where: Path) -> float:
    step = entry.get(_STEP)
    if isinstance(step, torch.Tensor) and step.numel() == 1:
        step = step.item()
    try:
        return step_count(step)
    except ValueError as error:
        raise _damaged(where, _STEP, shown(step)) from error


def _iteration(table: Table, where: Path) -> int:
    try:
        return integer(table.get("iter_num"))
    except ValueError as error:
        raise _damaged(where, "iter_num", shown(table.get("iter_num"))) from error


def _table(table: Table, key: str, where: Path) -> Table:
    value = table.get(key)
    if not isinstance(value, Mapping):
        raise CheckpointError(
            "The file is not one of nanoGPT's",
            where=where,
            expected=f"the dictionary {key}",
            found=", ".join(map(str, list(table)[:_MOST_NAMED])),
        )
    return value


def _damaged(where: Path, key: str, actual: str) -> CheckpointError:
    return CheckpointError("An entry of nanoGPT's file makes no sense", where=f"{where}, {key}", found=actual)


def _log_choices(
    saved: _Saved, table: Table, groups: Sequence[Table], options: ImportOptions, *, is_sorted: bool
) -> None:
    """Log the choices left open by the file, and its part not carried over."""
    since = "sorted names, before May 2023" if is_sorted else "since May 2023"
    _log.info(f"{saved.path}: model.activation={saved.model.activation.value}, that of nanoGPT's version ({since})")
    if is_sorted:
        _log.warning("that version decayed no embeddings; a run decays them, unless optimizer.weight_decay=0")
    lacking = {name for name in stored_tensors(saved.model) if name not in saved.weights}
    lacking -= frozen_names(saved.model, options.config.train.freeze)
    if lacking:
        _log.warning(
            f"the model has no biases: {len(lacking)} are zero, and a run trains them; "
            """'train.freeze=["*.bias"]' keeps them zero, here and in the run"""
        )
    keys = ("lr", "betas", "eps", "weight_decay")
    for line in sorted({", ".join(f"{key} {shown(g[key])}" for key in keys if key in g) for g in groups}):
        _log.info(f"the optimizer was set to {line}: not carried, the run that continues has its own, optimizer.*")
    _log.info("not carried: best_val_loss, config; nanoGPT draws its batches at random, so there is no data position")
    steps = {_steps(entry, saved.path) for entry in saved.state.values()}
    if saved.state and steps != {float(_iteration(table, saved.path))}:
        _log.warning(f"AdamW made {sorted(steps)} steps in {table.get('iter_num')} iterations; both are kept")


FORMAT = Format("a ckpt.pt of nanoGPT", read_source, names_model=True)
