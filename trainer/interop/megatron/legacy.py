"""Reads Megatron-LM's `torch` format: a folder `mp_rank_TT[_PPP]` for each tensor- and pipeline-parallel rank.

Sources: `get_checkpoint_name`, `save_checkpoint` and `generate_state_dict` in `megatron/training/checkpointing.py`,
`save_parameter_state` in `megatron/core/optimizer/distrib_optimizer.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprise.errors import CheckpointError, MismatchError, count_of
from reprise.storage import integer, is_file, matching, shown
from trainer.interop.formats import ImportOptions, few, parameter_groups, steps_of
from trainer.interop.megatron.buckets import Bucket, locate
from trainer.interop.megatron.legacy_names import require_known_version, stage_of
from trainer.interop.megatron.names import MegatronTensor
from trainer.interop.megatron.numbered import named_state
from trainer.interop.megatron.shards import Pieces, Stage, by_global_name, stage_order
from trainer.interop.megatron.state import (
    MASTERS,
    Joined,
    MegatronCheckpoint,
    SavedOptimizer,
)
from trainer.interop.source import MOMENTS
from trainer.interop.stored import FileTensor
from trainer.interop.torch_file import attributes_of, is_plain, read_torch_file

Table = Mapping[Any, Any]

_RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?")
_MODEL, _FLAT = "model_optim_rng.pt", "distrib_optim.pt"
_CHUNK = re.compile(r"model(\d*)")
_OWN = "language_model"  # in Megatron-LM's own models, which preceded Megatron-Core's


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank's files: its model file, and the distributed optimizer's buffers, if any.

    Args:
        chunks: Each virtual stage's parameters, in the file's order, which is `model.parameters()` order.
    """

    path: Path
    model: Table
    flat: Table | None
    chunks: Sequence[Stage]


def is_legacy(path: Path) -> bool:
    """Return whether a folder holds an iteration in the `torch` format."""
    return any(_RANK.match(child.name) for child in matching(path, "mp_rank_*"))


def read_legacy(path: Path, options: ImportOptions) -> MegatronCheckpoint:
    """Open an iteration folder in the `torch` format. The files are mapped.

    Raises:
        CheckpointError: Files are missing, damaged, or from different saves.
        MismatchError: The form is not supported.
    """
    ranks = _ranks(path, options)
    first, stages = ranks[0][0].model, stage_order(len(ranks), len(ranks[0][0].chunks))
    require_known_version(first.get("checkpoint_version"), where=path)
    weights = by_global_name([[rank.chunks[chunk] for rank in ranks[stage]] for stage, chunk in stages])

    def optimizer(tensors: Sequence[MegatronTensor], joined: Joined) -> SavedOptimizer | None:
        del tensors, joined  # the files themselves tell which parameter has which state
        if first.get("optimizer") is None and ranks[0][0].flat is None:
            return None
        states = [[_rank_state(rank) for rank in stage] for stage in ranks]
        pieces = dict[str, Pieces]()
        for key in states[0][0][0]:
            parts = [[state[chunk].get(key, {}) for state in states[stage]] for stage, chunk in stages]
            pieces[key] = by_global_name(parts)
        steps = [step for rank in itertools.chain(*ranks) for step in steps_of(rank.model["optimizer"])]
        return SavedOptimizer(pieces, parameter_groups(first.get("optimizer")), steps)

    return MegatronCheckpoint(path, first, _arguments(first), weights, len(ranks), optimizer)


# ---- files


def _ranks(path: Path, options: ImportOptions) -> list[list[_Rank]]:
    """Return each stage's ranks, by tensor-parallel rank."""
    ranks_by_place = {
        (int(match[1]), int(match[2] or 0)): _open(child, with_optimizer=not options.weights_only)
        for child in matching(path, "mp_rank_*")
        if (match := _RANK.fullmatch(child.name))
    }
    args = _arguments(ranks_by_place[0, 0].model) if (0, 0) in ranks_by_place else {}
    tp, pp = (
        max(1, integer(args.get(f"{kind}_model_parallel_size") or 1), *(1 + place[axis] for place in ranks_by_place))
        for axis, kind in enumerate(("tensor", "pipeline"))
    )
    needed = ((rank, stage) for rank in range(tp) for stage in range(pp))
    if lacking := list(itertools.islice((place for place in needed if place not in ranks_by_place), 10)):
        raise CheckpointError(
            "Megatron checkpoint files are missing",
            where=path,
            expected=f"files for {count_of(tp, 'tensor-parallel rank')} in each of {count_of(pp, 'stage')}",
            found="no " + few(f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "") for rank, stage in lacking),
            fix="Each node writes only its own ranks' files: copy the files of all nodes into this folder. "
            "Folders with a third number, of expert-parallel ranks, are not supported.",
        )
    ranks = [[ranks_by_place[rank, stage] for rank in range(tp)] for stage in range(pp)]
    _check_one_save(ranks, path)
    return ranks


def _open(folder: Path, *, with_optimizer: bool) -> _Rank:
    file = folder / _MODEL
    table = read_torch_file(file)
    numbered = {match[1]: value for key, value in table.items() if (match := _CHUNK.fullmatch(str(key)))}
    ordered = sorted(numbered.items(), key=lambda item: int(item[0] or 0))
    chunks = [stage_of(value) for _, value in ordered]
    flat = read_torch_file(folder / _FLAT) if with_optimizer and is_file(folder / _FLAT) else None
    return _Rank(folder, table, flat, chunks)


def _check_one_save(ranks: Sequence[Sequence[_Rank]], path: Path) -> None:
    marks = dict[str, str]()
    for rank in itertools.chain(*ranks):
        content = (rank.model.get("iteration"), rank.model.get("checkpoint_version"), len(rank.chunks), bool(rank.flat))
        marks.setdefault(shown(content), rank.path.name)
    if len(marks) > 1:
        raise CheckpointError(
            "A Megatron checkpoint's files come from different saves",
            where=path,
            expected=f"the same iteration, version and number of virtual stages, and a {_FLAT} from each or from none",
            found="; ".join(f"{name}: {mark}" for mark, name in marks.items()),
        )


def _arguments(table: Table) -> dict[str, Any]:
    """Return the attributes of `args`, with newer names, older versions' values, and whose model it is."""
    arguments = attributes_of(table.get("args"))
    if arguments:
        older = {"position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False}
        arguments = {**older, **arguments}
    if "layernorm_epsilon" in arguments:
        arguments.setdefault("norm_epsilon", arguments["layernorm_epsilon"])
    if any(_OWN in table[key] for key in ("model", "model0") if key in table):
        arguments["use_legacy_models"] = True
    return arguments


# ---- the optimizer


def _rank_state(rank: _Rank) -> list[dict[str, dict[str, FileTensor]]]:
    """Return a rank's pieces of master weights and moments by name, for each chunk."""
    entry = rank.model.get("optimizer")
    is_numbered = any("params" in group for group in parameter_groups(entry))
    if not isinstance(entry, Mapping) or not (rank.flat or is_numbered):
        raise CheckpointError(
            "The optimizer's state is missing or not supported",
            where=rank.path,
            expected=f"{_FLAT}, or numbered parameters of one optimizer in {_MODEL}",
            found=f"a {type(entry).__name__}",
            fix="Copy it too, or import the weights alone with --weights-only. Chained optimizers are not supported.",
        )
    return _buffer_state(rank) if rank.flat else named_state(entry, rank.chunks, where=rank.path / _MODEL)


def _buffer_state(rank: _Rank) -> list[dict[str, dict[str, FileTensor]]]:
    """Return the pieces in the flat buffers. Each chunk has a buffer."""
    assert rank.flat is not None
    where = rank.path / _FLAT
    buffers = [value for key, value in sorted((k, v) for k, v in rank.flat.items() if isinstance(k, int))]
    if len(buffers) != len(rank.chunks) or not all(isinstance(b, Mapping) and len(b) == 1 for b in buffers):
        raise MismatchError(
            "The distributed optimizer does not have one buffer per model chunk",
            where=where,
            expected=len(rank.chunks),
            found=len(buffers),
            fix="Mixed parameter dtypes are not supported. Import the weights alone with --weights-only.",
        )
    state = []
    for chunk, (buffer,) in zip(rank.chunks, (tuple(b.values()) for b in buffers), strict=True):
        flats = {MASTERS: _buckets(buffer, "param", where), **{kind: _buckets(buffer, kind, where) for kind in MOMENTS}}
        if len({tuple(bucket.size for bucket in buckets) for buckets in flats.values()}) > 1:
            raise ValueError(f"{where}: a moment's buffer has another length than the weights'")
        slots = locate(chunk, flats[MASTERS], is_padded="numel_unpadded" not in buffer, where=where)
        state.append(
            {
                key: {name: FileTensor.of(slots[name].take(buckets, piece.shape)) for name, piece in chunk.items()}
                for key, buckets in flats.items()
            }
        )
    return state


def _buckets(buffer: Table, key: str, where: Path) -> list[Bucket]:
    """Return a buffer's buckets, or a single tensor concatenating them."""
    content = buffer.get(key)
    every = list(content) if isinstance(content, list) else [content]
    tensors = [tensor for tensor in every if is_plain(tensor) and tensor.dim() == 1]
    if len(tensors) != len(every):
        raise CheckpointError(
            "The distributed optimizer's file lacks a buffer, or the optimizer is not Adam",
            where=where,
            expected=f"1-d tensors {key}",
            found=", ".join(map(str, buffer)),
            fix="Import the weights alone with --weights-only.",
        )
    return [Bucket(len(tensor), tensor.dtype, tensor.__getitem__) for tensor in tensors]
