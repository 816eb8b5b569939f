"""Reads checkpoints of Megatron-DeepSpeed: tensor x pipeline parallelism x ZeRO 1 or 2.

A model-parallel rank, stage * tensor-parallel ranks + tensor-parallel rank, has a model file with the names and shapes
of its parameters, and a file of each data-parallel rank with its part of the flat buffers. With a pipeline, the weights
are in a file for each layer and tensor-parallel rank. Stages hold layers of a `PipelineModule`, which are numbered
through the model and of which only some are transformer layers.

Sources: `GPTModelPipe` of Megatron-DeepSpeed's `megatron/model/gpt_model.py`; `save_state_dict` of DeepSpeed's
`runtime/pipe/module.py`, `PipelineParallelGrid` of `runtime/pipe/topology.py`.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reprise.errors import CheckpointError, MismatchError, count_of
from reprise.files import is_file
from reprise.json_file import integer, shown
from trainer.interop.deepspeed.flat import WEIGHTS, Flats, Unsharded, locate
from trainer.interop.deepspeed.folder import DeepSpeedCheckpoint, Table, check_complete, take
from trainer.interop.formats import ImportOptions
from trainer.interop.megatron.arguments import DescribedModel, describe
from trainer.interop.megatron.joined import EMBEDDING, MASTERS, OUTPUT, Pieces, joined_state
from trainer.interop.megatron.legacy_names import core_name, in_newest_order_of_all, stage_of
from trainer.interop.megatron.shards import RankCopies, RankPiece, Stage, by_global_name, joined_shape, layers_of
from trainer.interop.megatron.state import MOMENTS, MegatronState, consumed_samples, log_omissions
from trainer.interop.torch_file import PlainObject, open_torch_file

_log = logging.getLogger(__name__)

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_FIRST = "mp_rank_00_model_states.pt"
_BEYOND = (
    (re.compile(r"layer_\d+_expert_|expert_|expp_rank_"), "experts"),
    (re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt"), "parameters cut by ZeRO 3"),
)
_TIED = "tied_modules.embed."
_NUMBERED = re.compile(r"(\d+)\.(.+)")
_POSITIONS = "embedding.position_embeddings.weight"
# An argument since commit 676a482 of December 2024. From then on, a rank's rows of `query_key_value` are all queries,
# all keys, all values, as in version 0, though the files name version 3.
_SINCE_2024 = "ds_sequence_parallel_fpdt"
# Values of Megatron-DeepSpeed's arguments, as Megatron-LM has them.
_NORMALIZATIONS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_RENAMED = {"num_key_value_heads": "num_query_groups", "rope_theta": "rotary_base", "layernorm_epsilon": "norm_epsilon"}


@dataclass(frozen=True, slots=True)
class _Rank:
    """A model-parallel rank: its model file, and its parameters in the flat buffers, if there are any."""

    table: Table
    flats: Flats | None


def is_megatron(folder: Path) -> bool:
    """Return whether a folder of a tag is of Megatron-DeepSpeed, whose model files hold Megatron's arguments."""
    file = folder / _FIRST
    return is_file(file) and "num_layers" in _arguments(open_torch_file(file, PlainObject, is_checked=False))


def read_megatron(folder: Path, options: ImportOptions) -> tuple[MegatronState, DescribedModel]:
    """Open the folder of a tag. The files are mapped.

    Raises:
        CheckpointError: if files are missing, damaged, or of several saves.
        MismatchError: if the model is none of ours, or was saved in an unsupported way.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    for name in names:
        for pattern, what in _BEYOND:
            if pattern.match(name):
                raise MismatchError(
                    f"A checkpoint of Megatron-DeepSpeed with {what} is not imported", where=folder / name
                )
    ranks = _ranks(folder, names, options)
    first = ranks[0].table
    args = _arguments(first)
    tp = integer(args.get("tensor_model_parallel_size", 1))
    stages = [ranks[begin : begin + tp] for begin in range(0, len(ranks), tp)]
    weights = _weights(folder, names, stages)
    if EMBEDDING not in weights:
        raise CheckpointError("The first stage has no embedding", where=folder, expected=EMBEDDING)
    described = describe(args, joined_shape(weights[EMBEDDING], 0)[0], layers_of(weights), options, where=folder)
    optimizer_pieces, step = _optimizer_pieces(folder, stages, weights_only=options.weights_only)
    if not optimizer_pieces and not options.weights_only:
        raise MismatchError(
            "The moments of Megatron-DeepSpeed at ZeRO 0 are not read",
            where=folder,
            fix="Take the weights alone with --weights-only.",
        )
    is_since_2024 = _SINCE_2024 in args
    version = 0 if is_since_2024 else first.get("checkpoint_version")
    fixed = {
        key: in_newest_order_of_all(pieces, version, described.model, where=folder)
        for key, pieces in {"": weights, **optimizer_pieces}.items()
    }
    since = "since" if is_since_2024 else "before"
    ranks_and_stages = f"{count_of(tp, 'tensor-parallel rank')}, {count_of(len(stages), 'stage')}, ZeRO"
    _log.info(f"{folder}: Megatron-DeepSpeed, {ranks_and_stages}; rows of query_key_value as {since} December 2024")
    log_omissions(first, described, args)
    iteration = take(first, "global_steps", int, folder)
    state = joined_state(
        fixed.pop(""),
        {key: pieces for key, pieces in fixed.items() if key in optimizer_pieces},
        described,
        step=step,
        iteration=iteration,
        consumed_samples=consumed_samples(first, args),
        copies=RankCopies(options.from_rank0),
        where=folder,
    )
    return state, described


def _arguments(table: Table) -> dict[str, Any]:
    """Return the attributes of `args`, named and spelled as Megatron-LM's."""
    args = table.get("args")
    arguments = dict(args.attributes) if isinstance(args, PlainObject) else {}
    for alias, name in _RENAMED.items():
        if arguments.get(name) is None and arguments.get(alias) is not None:
            arguments[name] = arguments[alias]
    arguments["normalization"] = _NORMALIZATIONS.get(
        str(arguments.get("normalization")), arguments.get("normalization", "LayerNorm")
    )
    if arguments.get("num_experts") in ([1], [0]):
        arguments["num_experts"] = None
    older = {"position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False}
    return {**older, "use_legacy_models": True, **arguments}


def _ranks(folder: Path, names: Sequence[str], options: ImportOptions) -> list[_Rank]:
    """Return the model-parallel ranks in order."""
    models = {int(match[1]): name for name in names if (match := _MODEL.fullmatch(name))}
    optimizers = dict[int, dict[int, str]]()
    for name in names:
        if match := _OPTIMIZER.fullmatch(name):
            optimizers.setdefault(int(match[2]), {})[int(match[1])] = name
    tables = {rank: open_torch_file(folder / name, PlainObject) for rank, name in sorted(models.items())}
    args = _arguments(tables[0])
    sizes = [integer(args.get(f"{kind}_model_parallel_size") or 1) for kind in ("tensor", "pipeline")]
    count = sizes[0] * sizes[1]
    missing = itertools.islice((rank for rank in range(count) if rank not in tables), 10)
    if affected := [*missing, *(rank for rank in tables if rank >= count)]:
        raise CheckpointError(
            "Files of a checkpoint of Megatron-DeepSpeed are missing, or of several saves",
            where=folder,
            expected=f"mp_rank_NN_model_states.pt of {count_of(sizes[0], 'tensor-parallel rank')} "
            f"in each of {count_of(sizes[1], 'stage')}",
            found=f"missing or beyond: {', '.join(f'{rank:02d}' for rank in affected[:10])}",
            fix="Every node writes those of its own ranks: bring them all into this folder.",
        )
    model_ranks = []
    for rank, table in tables.items():
        if not optimizers:
            model_ranks.append(_Rank(table, None))
            continue
        shard_names = dict(sorted(optimizers.get(rank, {}).items()))
        files = [open_torch_file(folder / name) for name in shard_names.values()]
        check_complete(folder, [table], files, {"model": set(), "optim": set(shard_names)})
        saved = DeepSpeedCheckpoint(
            folder, [table], [take(file, "optimizer_state_dict", dict, folder) for file in files], is_stage_3=False
        )
        model_ranks.append(
            _Rank(table, locate(saved, Unsharded({}, {}), listed_names=None, weights_only=options.weights_only))
        )
    steps = {shown(table.get("global_steps")) for table in tables.values()}
    if len(steps) > 1:
        raise CheckpointError(
            "The files of a checkpoint are of several saves", where=folder, found=f"global_steps {sorted(steps)}"
        )
    return model_ranks


def _weights(folder: Path, names: Sequence[str], stages: Sequence[Sequence[_Rank]]) -> Pieces:
    """Return the pieces of the model's own weights: of files of layers, or of the model files."""
    files = {(int(m[1]), int(m[2])): name for name in names if (m := _LAYER.fullmatch(name))}
    if not files:
        modules = [[stage_of(take(rank.table, "module", dict, folder), where=folder) for rank in s] for s in stages]
        return by_global_name(modules, where=folder)
    layers, tp = sorted({layer for layer, _ in files}), len(stages[0])
    if lacking := [(layer, rank) for layer in layers for rank in range(tp) if (layer, rank) not in files]:
        listing = ", ".join(f"layer_{layer:02d}-model_{rank:02d}-model_states.pt" for layer, rank in lacking[:10])
        raise CheckpointError("Files of layers are missing", where=folder, found=f"no {listing}")
    ranks = []
    for rank in range(tp):
        tables = {layer: open_torch_file(folder / files[(layer, rank)], PlainObject) for layer in layers}
        pieces = {
            f"{number}.{name}": piece
            for number, table in tables.items()
            for name, piece in stage_of(table, where=folder, renames=False).items()
        }
        # The layers are numbered through the model, so that all of them are one stage here.
        ranks.append(_core_names(pieces, is_first=True))
    return by_global_name([ranks], where=folder)


def _optimizer_pieces(
    folder: Path, stages: Sequence[Sequence[_Rank]], *, weights_only: bool
) -> tuple[dict[str, Pieces], float]:
    """Return the pieces of the float32 copies and of the moments by global name, and the number of steps."""
    if stages[0][0].flats is None:
        return {}, 0.0
    pieces = dict[str, Pieces]()
    for key in (WEIGHTS, *(() if weights_only else MOMENTS)):
        parts = [
            [_core_names(_in_flats(rank.flats, key), is_first=number == 0) for rank in ranks]
            for number, ranks in enumerate(stages)
        ]
        pieces[MASTERS if key == WEIGHTS else key] = by_global_name(parts, where=f"{folder}, {key}")
    flats = [rank.flats for ranks in stages for rank in ranks if rank.flats is not None]
    steps = {place.step for buffers in flats for place in buffers.places.values()}
    if len(steps) > 1:
        raise CheckpointError(
            "The ranks' optimizers made other numbers of steps", where=folder, found=sorted(map(str, steps))
        )
    return pieces, steps.pop() or 0.0


def _in_flats(flats: Flats | None, key: str) -> dict[str, RankPiece]:
    assert flats is not None
    return {name: RankPiece(place.shape, partial(flats.read, key, name)) for name, place in flats.places.items()}


def _core_names(pieces: Stage, *, is_first: bool) -> dict[str, RankPiece]:
    """Return the pieces of a stage under Megatron-Core's names, with the layers of the stage numbered from 0.

    The last stage of several has the complete tied module: its table of positions is unused there, with other values.
    """
    renamed = dict[str, RankPiece]()
    numbers = {int(m[1]) for name in pieces if (m := _NUMBERED.fullmatch(name)) and _is_block(m[2])}
    place = {number: index for index, number in enumerate(sorted(numbers))}
    for name, piece in pieces.items():
        core = _core_name(name.removeprefix("module."), place)
        if name.startswith(_TIED) and not is_first:
            if core == _POSITIONS:
                continue
            core = OUTPUT
        renamed[core] = piece
    return renamed


def _is_block(name: str) -> bool:
    return name.startswith(("input_layernorm.", "self_attention.", "attention.", "post_attention_layernorm.", "mlp."))


def _core_name(name: str, place: Mapping[int, int]) -> str:
    if name.startswith(_TIED):
        return f"embedding.{name.removeprefix(_TIED)}"
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return core_name(name)
    number, suffix = int(match[1]), match[2]
    if number in place and _is_block(suffix):
        return core_name(f"language_model.encoder.layers.{place[number]}.{suffix}")
    if suffix in ("weight", "bias"):
        return f"decoder.final_layernorm.{suffix}"
    if suffix.startswith(("word_embeddings.", "position_embeddings.")):
        return f"embedding.{suffix}"
    return suffix.replace("lm_head.", "output_layer.")
