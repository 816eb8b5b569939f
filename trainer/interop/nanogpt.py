"""Imports nanoGPT's `ckpt.pt`: weights, AdamW's moments and steps, without nanoGPT.

Sources: `GPT` and `configure_optimizers` in nanoGPT's `model.py`, and the saving code in `train.py`, all versions up to
commit 3adf61e. No file records the activation. It is inferred from the optimizer's parameter order, which changed
eleven days before the activation, in May 2023.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from models.config import Activation, Family, ModelConfig
from models.families import stored_tensors
from models.spec import OUTPUT
from reprise.errors import CheckpointError, MismatchError
from reprise.storage import finite_number, integer, is_dir, shown
from reprise.tensors import canonical_name
from trainer.config.frozen import frozen_names
from trainer.interop.formats import Format, ImportOptions, few, known_form, listed, log_settings, require_trust
from trainer.interop.numbered import MOMENTS, STEP, Table, check_moments, entries_by_name, steps_of, unknown_order
from trainer.interop.source import StateSource
from trainer.interop.torch_file import is_plain, open_torch_file

_log = logging.getLogger(__name__)

_EMBEDDING, _POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"
_LAYER = re.compile(r"transformer\.h\.(\d+)\.")
_MASK = re.compile(r"transformer\.h\.\d+\.attn\.bias")
# Ours are [in, out], as in transformers' Conv1D. nanoGPT's are [out, in], as in Linear.
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_ARGUMENTS = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
_END_OF_TEXT = 50256  # in GPT-2's vocabulary, which nanoGPT pads to 50304


@dataclass(frozen=True, slots=True)
class _Saved:
    """A file's content.

    Args:
        weights: Weights by stored name. A model without biases has none.
        entries: Each weight's optimizer entry. Empty without moments.
    """

    model: ModelConfig
    weights: Mapping[str, torch.Tensor]
    entries: Mapping[str, Table] = field(default_factory=dict)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in our orientation. Missing biases are zero, with zero moments and step 0."""
        key, _, parameter = name.partition(".")
        if key == STEP:
            return torch.tensor(steps_of(self.entries[parameter]) if parameter in self.weights else 0.0)
        is_moment = key in MOMENTS
        stored = parameter if is_moment else name
        if stored not in self.weights:
            return torch.zeros(stored_tensors(self.model)[stored].shape)
        tensor = self.entries[stored][key] if is_moment else self.weights[stored]
        return tensor.T if stored.endswith(_TRANSPOSED) else tensor


def read_source(path: Path, options: ImportOptions) -> StateSource:
    """Open a `ckpt.pt`, or its folder.

    The tensors are mapped. Beyond the mapping, at most a single tensor is in memory. A model without biases gets zero
    biases, which a run trains unless `train.freeze` names them.

    Raises:
        ConfigError: Pickles are not trusted. The file is a pickle, although its code is never run.
        CheckpointError: The file is missing or damaged.
        MismatchError: The model is not nanoGPT's, or its moments cannot be assigned with certainty.
    """
    require_trust(options, "nanoGPT", where=path)
    file = path / "ckpt.pt" if is_dir(path) else path
    with known_form("nanoGPT", file):
        table = open_torch_file(file)
        weights = _weights(table["model"], file)
        model = _model(table["model_args"], weights, where=file)
        _check_model(weights, model, where=file)
        groups = table["optimizer"]["param_groups"] if "optimizer" in table or not options.weights_only else []
        order, is_sorted = _order(groups, [name for name in stored_tensors(model) if name in weights], weights)
        if is_sorted:
            model = replace(model, activation=Activation.gelu_tanh)
        saved = _Saved(model, weights)
        if not options.weights_only:
            if order is None:
                raise _unknown_order(groups, weights, file)
            saved = replace(saved, entries=entries_by_name(table["optimizer"], order))
            check_moments(saved.entries, {name: weight.shape for name, weight in weights.items()}, where=file)
        iteration = 0 if options.weights_only else integer(table["iter_num"])
        _log_choices(saved, iteration, groups, options, is_sorted=is_sorted)
    return StateSource(model, iteration, has_optimizer=not options.weights_only, read=saved.read)


def _weights(module: Table, where: Path) -> dict[str, torch.Tensor]:
    """Return the weights by name, in file order, without compilation prefixes, masks and a tied output layer."""
    weights = {canonical_name(str(name)): tensor for name, tensor in module.items()}
    weights = {name: tensor for name, tensor in weights.items() if not _MASK.fullmatch(name)}
    if malformed := [name for name, tensor in weights.items() if not is_plain(tensor)]:
        raise CheckpointError("A weight is not a dense floating-point tensor", where=where, found=", ".join(malformed))
    for name in (_EMBEDDING, _POSITIONS):
        if name not in weights or weights[name].dim() != 2:
            raise MismatchError(
                "The file holds no nanoGPT model",
                where=where,
                expected=f"a matrix {name}",
                found=few(weights),
            )
    if OUTPUT in weights and torch.equal(weights[OUTPUT], weights[_EMBEDDING]):
        del weights[OUTPUT]
    return weights


def _order(
    groups: Sequence[Table], names: Sequence[str], weights: Mapping[str, torch.Tensor]
) -> tuple[list[str] | None, bool]:
    """Return the optimizer's parameters in its order, or None if unknown, and whether it is the older order.

    Until 6 May 2023 the names were sorted. Embeddings did not decay, but an untied output layer did.

    Args:
        names: The weight names, in module order.
    """
    matrices = [name for name in names if weights[name].dim() >= 2]
    linear = sorted(name for name in matrices if name not in (_EMBEDDING, _POSITIONS))
    counts = [len(group["params"]) for group in groups]
    if counts == [len(matrices), len(names) - len(matrices)]:
        return [*matrices, *(name for name in names if weights[name].dim() < 2)], False
    if counts == [len(linear), len(names) - len(linear)]:
        return [*linear, *sorted(set(names) - set(linear))], True
    return None, False


def _unknown_order(groups: Sequence[Table], weights: Mapping[str, torch.Tensor], where: Path) -> MismatchError:
    matrices = sum(tensor.dim() >= 2 for tensor in weights.values())
    return unknown_order(
        "nanoGPT",
        groups,
        expected=f"two groups: {matrices} parameters with decay (or {matrices - 2}, before May 2023) and the others",
        fix="The optimizer does not come from nanoGPT's configure_optimizers.",
        where=where,
    )


def _model(arguments: Table, weights: Mapping[str, torch.Tensor], *, where: Path) -> ModelConfig:
    """Return the model, with sizes from the tensors. `model_args` must not contradict them."""
    if unknown := sorted(set(map(str, arguments)) - _ARGUMENTS):
        raise MismatchError(
            "The model has settings that nanoGPT lacks",
            where=f"{where}, model_args",
            expected=", ".join(sorted(_ARGUMENTS)),
            found=", ".join(f"{name}={shown(arguments[name])}" for name in unknown),
            fix="A program derived from nanoGPT wrote it, and its model may compute something else, so it cannot be "
            "imported.",
        )
    vocab_size, width = weights[_EMBEDDING].shape
    positions, heads = len(weights[_POSITIONS]), integer(arguments.get("n_head"))
    n_layer = len({match[1] for name in weights if (match := _LAYER.match(name))})
    has_bias = any(name.endswith(".bias") for name in weights)
    sizes = {"n_layer": n_layer, "n_embd": width, "block_size": positions, "vocab_size": vocab_size, "bias": has_bias}
    problems = [
        f"{name}={shown(arguments[name])}, the tensors have {size}"
        for name, size in sizes.items()
        if arguments.get(name, size) not in (size, None)
    ]
    if heads < 1 or width % heads:
        problems.append(f"n_head={heads} of n_embd={width}")
    if problems:
        raise CheckpointError(
            "model_args and the tensors describe different models", where=where, found="; ".join(problems)
        )
    end = _END_OF_TEXT if vocab_size > _END_OF_TEXT else vocab_size - 1
    return ModelConfig(
        family=Family.gpt2,
        n_layer=n_layer,
        n_head=heads,
        n_kv_head=heads,
        n_embd=width,
        intermediate_size=4 * width,
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        bos_token_id=end,
        eos_token_id=end,
        tie_word_embeddings=OUTPUT not in weights,
        dropout=finite_number(arguments.get("dropout", 0.0)),
        activation=Activation.gelu,
    )


def _check_model(weights: Mapping[str, torch.Tensor], model: ModelConfig, *, where: Path) -> None:
    """Refuse missing or unexpected tensors, and other shapes. A model may lack all its biases."""
    expected = stored_tensors(model)
    has_bias = any(name.endswith(".bias") for name in weights)
    problems = [f"missing: {n}" for n in expected if n not in weights and (has_bias or not n.endswith(".bias"))]
    problems += [f"not of the model: {name}" for name in weights if name not in expected]
    for name, tensor in weights.items():
        shape = tuple(reversed(tensor.shape)) if name.endswith(_TRANSPOSED) else tuple(tensor.shape)
        if name in expected and shape != expected[name].shape:
            problems.append(f"{name}: shape {list(tensor.shape)}")
    if problems:
        raise MismatchError(
            "The file's model differs from nanoGPT's",
            where=where,
            expected=f"n_layer={model.n_layer}, n_embd={model.n_embd}, with an MLP of 4 times the width",
            found=listed(problems, "difference"),
        )


def _log_choices(
    saved: _Saved, iteration: int, groups: Sequence[Table], options: ImportOptions, *, is_sorted: bool
) -> None:
    """Log choices left open by the file, and content not carried over."""
    since = "sorted names, before May 2023" if is_sorted else "since May 2023"
    _log.info(f"model.activation={saved.model.activation.value}, that of nanoGPT's version ({since})")
    if is_sorted:
        _log.warning("that version decayed no embeddings; a run decays them, unless optimizer.weight_decay=0")
    lacking = {name for name in stored_tensors(saved.model) if name not in saved.weights}
    if lacking := lacking - frozen_names(saved.model, options.config.train.freeze):
        _log.warning(
            f"the model has no biases: {len(lacking)} are zero, and a run trains them; "
            """'train.freeze=["*.bias"]' keeps them zero, here and in the run"""
        )
    log_settings(groups)
    _log.info("not carried: best_val_loss, config; nanoGPT draws its batches at random, so there is no data position")
    steps = {steps_of(entry) for entry in saved.entries.values()}
    if steps and steps != {float(iteration)}:
        _log.warning(f"AdamW made {sorted(steps)} steps in {iteration} iterations; both are kept")


FORMAT = Format("a nanoGPT ckpt.pt", read_source)
