"""Imports nanoGPT's `ckpt.pt`: weights, AdamW's moments and steps, without nanoGPT.

Sources: `GPT` and `configure_optimizers` in nanoGPT's `model.py`, and the saving code in `train.py`, all versions up to
commit 3adf61e. No file records the activation. It is inferred from the optimizer's parameter order, which changed
eleven days before the activation, in May 2023.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from models.config import Activation, Family, ModelConfig
from models.families import stored_tensors
from models.spec import OUTPUT
from reprise.errors import MismatchError
from reprise.storage import finite_number, integer, is_dir, shown
from reprise.tensors import canonical_name
from trainer.config.frozen import frozen_names
from trainer.interop.formats import Format, ImportOptions, common_step, few, log_settings, require_trust
from trainer.interop.numbered import Table, entries_by_name
from trainer.interop.source import STEP, StateSource, by_kind
from trainer.interop.stored import require_fit
from trainer.interop.torch_file import is_plain, read_torch_file

_log = logging.getLogger(__name__)

_EMBEDDING, _POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"
_LAYER = re.compile(r"transformer\.h\.(\d+)\.")
_MASK = re.compile(r"transformer\.h\.\d+\.attn\.bias")
# Ours are [in, out], as in transformers' Conv1D. nanoGPT's are [out, in], as in Linear.
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_ARGUMENTS = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
_END_OF_TEXT = 50256  # in GPT-2's vocabulary, which nanoGPT pads to 50304


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
    table = read_torch_file(file)
    weights = _weights(table["model"])
    model = _model(table["model_args"], weights, where=file)
    _check_model(weights, model, where=file)
    shapes = {name: weights[name].shape for name in stored_tensors(model) if name in weights}
    decayed = [name for name in shapes if len(shapes[name]) > 1]
    vectors = [name for name in shapes if len(shapes[name]) < 2]
    first: Table = next(iter(table.get("optimizer", {}).get("param_groups", ())), {})
    if len(first.get("params", ())) == len(decayed) - 2:  # before May 2023: sorted names, embeddings without decay
        decayed = sorted({*decayed} - {_EMBEDDING, _POSITIONS})
        vectors, model = sorted(shapes.keys() - decayed), replace(model, activation=Activation.gelu_tanh)
        _log.warning("that version decayed no embeddings; a run decays them, unless optimizer.weight_decay=0")
    entries, iteration, step = dict[str, Table](), 0, 0.0
    if not options.weights_only:
        optimizer, iteration = table["optimizer"], integer(table["iter_num"])
        entries = entries_by_name(optimizer, [(decayed, vectors)], shapes, program="nanoGPT", where=file)
        step = common_step(entry.get(STEP) for entry in entries.values()) or 0.0
        log_settings(optimizer["param_groups"])
        if step != iteration:
            _log.warning(f"AdamW made {step:.0f} steps in {iteration} iterations; both are kept")
    _log_choices(model, weights, options)

    def read(kind: str, name: str) -> torch.Tensor:
        if name not in weights:
            return torch.zeros(stored_tensors(model)[name].shape)
        tensor = entries[name][kind] if kind else weights[name]
        return tensor.T if name.endswith(_TRANSPOSED) else tensor

    source = by_kind(partial(read, ""), read, lambda name: step if name in weights else 0.0)
    return StateSource(model, iteration, not options.weights_only, source)


def _weights(module: Table) -> dict[str, torch.Tensor]:
    """Return the weights by name, in file order, without compilation prefixes, masks and a tied output layer."""
    weights = {canonical_name(str(name)): tensor for name, tensor in module.items()}
    weights = {name: tensor for name, tensor in weights.items() if not _MASK.fullmatch(name)}
    if strange := [name for name, tensor in weights.items() if not is_plain(tensor)]:
        raise ValueError(f"not dense floating-point tensors: {few(strange)}")
    if OUTPUT in weights and torch.equal(weights[OUTPUT], weights[_EMBEDDING]):
        del weights[OUTPUT]
    return weights


def _model(arguments: Table, weights: Mapping[str, torch.Tensor], *, where: Path) -> ModelConfig:
    """Return the model, with sizes from the tensors."""
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
    heads = integer(arguments.get("n_head"))
    end = _END_OF_TEXT if vocab_size > _END_OF_TEXT else vocab_size - 1
    return ModelConfig(
        family=Family.gpt2,
        n_layer=len({match[1] for name in weights if (match := _LAYER.match(name))}),
        n_head=heads,
        n_kv_head=heads,
        n_embd=width,
        intermediate_size=4 * width,
        vocab_size=vocab_size,
        max_position_embeddings=len(weights[_POSITIONS]),
        bos_token_id=end,
        eos_token_id=end,
        tie_word_embeddings=OUTPUT not in weights,
        dropout=finite_number(arguments.get("dropout", 0.0)),
        activation=Activation.gelu,
    )


def _check_model(weights: Mapping[str, torch.Tensor], model: ModelConfig, *, where: Path) -> None:
    """Refuse missing or unexpected tensors, and other shapes. A model may lack all its biases."""
    has_bias = any(name.endswith(".bias") for name in weights)
    expected = {
        name: tensor.shape[::-1] if name.endswith(_TRANSPOSED) else tensor.shape
        for name, tensor in stored_tensors(model).items()
        if has_bias or not name.endswith(".bias")
    }
    require_fit(weights, expected, where=f"{where}, with an MLP of 4 times the width")


def _log_choices(model: ModelConfig, weights: Mapping[str, torch.Tensor], options: ImportOptions) -> None:
    """Log choices left open by the file, and content not carried over."""
    _log.info(f"model.activation={model.activation.value}, that of nanoGPT's version")
    lacking = stored_tensors(model).keys() - weights.keys() - frozen_names(model, options.config.train.freeze)
    if lacking:
        _log.warning(
            f"the model has no biases: {len(lacking)} are zero, and a run trains them; "
            """'train.freeze=["*.bias"]' keeps them zero, here and in the run"""
        )
    _log.info("not carried: best_val_loss, config; nanoGPT draws its batches at random, so there is no data position")


FORMAT = Format("nanoGPT", "a nanoGPT ckpt.pt", read_source, takes_file=True)
