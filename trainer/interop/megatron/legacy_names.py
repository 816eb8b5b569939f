"""The tensors of a rank in Megatron-LM's format `torch`, under the names of Megatron-Core's `GPTModel`.

A rank's model is a flat dictionary (Megatron-Core) or dictionaries within each other (Megatron-LM's own models, also
under older names). Sources: `state_dict_for_save_checkpoint` of `megatron/model/{gpt_model,language_model}.py` from
Megatron-LM 2.0 to core_r0.12, `fix_query_key_value_ordering` of `megatron/training/checkpointing.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from models.config import ModelConfig
from reprise.errors import CheckpointError, MismatchError
from reprise.json_file import shown
from trainer.interop.megatron.shards import RankPiece, Stage
from trainer.interop.torch_file import is_plain

_QUERY_KEY_VALUE = ".self_attention.linear_qkv."
_LAST_VERSION = 3.0
_GROUPED = (2, 3)  # versions whose rows are ordered by query group
# Each rewrites the start, or the end, of a name.
_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^module\.", ""),
        (r"^language_model\.(?=embedding\.|output_layer\.)", ""),
        (r"^language_model\.(encoder|transformer)\.", "decoder."),
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"^decoder\.final_(layer)?norm\.", "decoder.final_layernorm."),
        (r"\.(self_)?attention\.query_key_value\.", _QUERY_KEY_VALUE),
        (r"\.(self_)?attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
        (r"\.input_(layer)?norm\.", ".self_attention.linear_qkv.layer_norm_"),
        (r"\.(post_attention_(layer)?norm|pre_mlp_layernorm)\.", ".mlp.linear_fc1.layer_norm_"),
    )
)
_NOT_PARAMETERS = re.compile(r"(_extra_state|rotary_pos_emb\.inv_freq)$")


def core_name(name: str) -> str:
    """Return the name of a parameter in Megatron-Core, with fused norms."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def stage_of(model: Mapping[Any, Any], *, where: object, renames: bool = True) -> dict[str, RankPiece]:
    """Return the parameters of a rank's part of the model, in the order of `model.parameters()`.

    Args:
        renames: whether to return the names of Megatron-Core.

    Raises:
        CheckpointError: if an entry is no dense tensor of floating point, or two entries are the same parameter.
    """
    pieces = dict[str, RankPiece]()
    for name, tensor in _flat(model, ""):
        if _NOT_PARAMETERS.search(name):
            continue
        if not is_plain(tensor):
            raise CheckpointError(
                "A weight is no dense tensor of floating point", where=f"{where}, {name}", found=type(tensor).__name__
            )
        core = core_name(name) if renames else name
        if core in pieces:
            raise CheckpointError("Two entries are one parameter", where=f"{where}, {name}", found=core)
        pieces[core] = RankPiece.of(tensor.detach())
    return pieces


def _flat(table: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def in_newest_order(stage: Stage, version: object, head_width: int, *, where: object) -> dict[str, RankPiece]:
    """Return the tensors of a stage with the rows of fused projections as version 2 and later have them.

    Of a rank's heads, each with D rows of q, k and v: version 0 has all q, all k, all v; version 1 has the three rows
    of each of the D numbers of a head in a row; version 2 has q, k, v of each head.

    Args:
        version: `checkpoint_version` of the file; None if it has none, which is version 0.
        head_width: D.

    Raises:
        MismatchError: for another version.
    """
    number = 0.0 if version is None else version
    if not isinstance(number, int | float) or not 0 <= number <= _LAST_VERSION or number not in (0, 1, 2, 3):
        raise MismatchError(
            "A Megatron checkpoint has a version that is not known",
            where=where,
            expected="checkpoint_version 0 to 3",
            found=shown(version),
        )
    if number >= 2:
        return dict(stage)
    is_first = number == 0
    return {
        name: _regrouped(piece, head_width, is_first) if _is_fused(name) else piece for name, piece in stage.items()
    }


def in_newest_order_of_all(
    pieces: Mapping[str, Sequence[RankPiece]], version: object, model: ModelConfig, *, where: object
) -> dict[str, list[RankPiece]]:
    """Return `in_newest_order` of the pieces of every tensor-parallel rank.

    Raises:
        MismatchError: for an unknown version, or a version before 2 of a model whose heads share keys and values.
    """
    count = max(map(len, pieces.values()), default=0)
    ranks = [
        in_newest_order({name: parts[rank] for name, parts in pieces.items()}, version, model.head_width, where=where)
        for rank in range(count)
    ]
    if model.n_kv_head != model.n_head and version not in _GROUPED:
        raise MismatchError(
            "The order of the rows of fused queries, keys and values is not certain",
            where=where,
            expected="rows by query group, as of checkpoint_version 2 and 3",
            found=f"those of version {shown(version)}, {model.n_head} heads of queries and {model.n_kv_head} of keys",
            fix="No program with grouped queries has that order: the arguments and the weights are of two programs.",
        )
    return {name: [rank[name] for rank in ranks] for name in pieces}


def _is_fused(name: str) -> bool:
    return name.endswith((f"{_QUERY_KEY_VALUE}weight", f"{_QUERY_KEY_VALUE}bias"))


def _regrouped(piece: RankPiece, head_width: int, is_first: bool) -> RankPiece:
    def read() -> torch.Tensor:
        tensor, columns = piece.read(), piece.shape[1:]
        if is_first:
            return tensor.reshape(3, -1, head_width, *columns).transpose(0, 1).reshape(piece.shape)
        return tensor.reshape(-1, head_width, 3, *columns).transpose(1, 2).reshape(piece.shape)

    return RankPiece(piece.shape, read)
