"""The files of a DeepSpeed checkpoint: which belong together, whether all are present, and unsupported variants.

Source of all names of files and entries: DeepSpeed's `runtime/engine.py` (`_get_ckpt_name`, `_get_rank_zero_ckpt_name`,
`_common_checkpoint_state`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reprise.errors import CheckpointError, MismatchError, count_of
from reprise.files import is_dir, is_file, is_file_name
from reprise.json_file import shown
from reprise.reading import no_folder
from trainer.interop.torch_file import open_torch_file

Table = Mapping[Any, Any]
T = TypeVar("T")

_MODEL = re.compile(r"mp_rank_(?P<tp>\d+)_model_states\.pt")
_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<tp>\d+)_(?P<kind>model|optim)_states\.pt")
_FOREIGN = (
    (re.compile(r"layer_\d+_expert_|expert_|expp_rank_"), "experts (DeepSpeed-MoE)"),
    (re.compile(r"layer_\d+-model_"), "layers of a pipeline"),
    (re.compile(r"offloaded_tensors$"), "tensors that were offloaded to NVMe"),
    (re.compile(r"zero$"), "a universal checkpoint"),
)
_WHOLE = "Consolidate it with DeepSpeed itself, or save it again without."


@dataclass(frozen=True, slots=True)
class DeepSpeedCheckpoint:
    """A complete checkpoint with open files.

    Args:
        path: the folder of a tag.
        models: the model file of each rank at ZeRO stage 3; otherwise the only model file.
        optimizers: the optimizer's state on each rank, in order; none at stage 0.
        is_stage_3: whether each parameter is sharded by itself rather than as part of a flat buffer.
    """

    path: Path
    models: Sequence[Table]
    optimizers: Sequence[Table]
    is_stage_3: bool


def open_saved(path: Path) -> DeepSpeedCheckpoint:
    """Open the files of a checkpoint written by `engine.save_checkpoint`.

    Args:
        path: the folder given to DeepSpeed, for the tag named in its file `latest`, or the folder of a tag.

    Raises:
        CheckpointError: if files are missing, damaged, or of several saves.
        MismatchError: if it was saved in an unsupported way.
    """
    folder = tag_of(path)
    names = sorted(entry.name for entry in folder.iterdir())
    _refuse_foreign(folder, names)
    shards = {kind: _ranks(folder, names, kind) for kind in ("model", "optim")}
    single = [name for name in names if _MODEL.fullmatch(name)]
    if not single and not shards["model"]:
        raise CheckpointError(
            "A folder holds no DeepSpeed checkpoint",
            where=folder,
            expected="mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt",
            found=", ".join(names[:10]) or "nothing",
        )
    models = [open_torch_file(folder / name) for name in (shards["model"].values() or single)]
    files = [open_torch_file(folder / name) for name in shards["optim"].values()]
    optimizers = [take(table, "optimizer_state_dict", dict, folder) for table in files]
    if shards["model"] and single:
        raise CheckpointError("A folder holds files of two saves", where=folder, found=f"{single[0]} and shards of it")
    check_complete(folder, models, files, {kind: set(files_by_rank) for kind, files_by_rank in shards.items()})
    return DeepSpeedCheckpoint(folder, models, optimizers, bool(shards["model"]))


def take(table: Table, key: object, kind: type[T], where: object) -> T:
    """Return an entry of a table, which must exist and have the given type.

    Raises:
        CheckpointError: if it does not.
    """
    value = table.get(key)
    if not isinstance(value, kind):
        raise CheckpointError(
            "A DeepSpeed file lacks an entry",
            where=where,
            expected=f"{key}, a {kind.__name__}",
            found=f"a {type(value).__name__}" if key in table else f"the entries {', '.join(map(str, table))}",
            fix="It is damaged, or of a version of DeepSpeed that is not known here.",
        )
    return value


def tag_of(path: Path) -> Path:
    """Return the folder of the requested tag: `path` itself, or the folder named in its file `latest`.

    Raises:
        CheckpointError: if it is not there.
        MismatchError: if there is only a universal checkpoint.
    """
    if not is_dir(path):
        raise no_folder(path)
    latest = path / "latest"
    if not is_file(latest):
        if is_file(path / "latest_universal"):
            raise _not_imported(path, "a universal checkpoint")
        return path
    tag = latest.read_bytes().decode("utf-8", "replace").strip()
    if not is_file_name(tag) or not is_dir(path / tag):
        raise CheckpointError("The newest tag of a folder is not there", where=latest, found=shown(tag))
    return path / tag


def _refuse_foreign(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        for pattern, what in _FOREIGN:
            if pattern.match(name):
                raise _not_imported(folder / name, what)
        match = _MODEL.fullmatch(name) or _SHARD.fullmatch(name)
        if match is not None and int(match["tp"]) > 0:
            raise _not_imported(folder / name, "parameters cut by tensor parallelism")


def _not_imported(where: object, what: str) -> MismatchError:
    return MismatchError(f"A DeepSpeed checkpoint with {what} is not imported", where=where, fix=_WHOLE)


def _ranks(folder: Path, names: Sequence[str], kind: str) -> dict[int, str]:
    """Return the files of a kind by rank, in order."""
    names_by_rank = dict[int, str]()
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is None or match["kind"] != kind:
            continue
        rank = int(match["rank"])
        if rank in names_by_rank:
            raise CheckpointError(
                "A folder holds files of two saves", where=folder, found=f"{names_by_rank[rank]} and {name}"
            )
        names_by_rank[rank] = name
    return dict(sorted(names_by_rank.items()))


def check_complete(
    folder: Path, models: Sequence[Table], files: Sequence[Table], ranks: Mapping[str, set[int]]
) -> None:
    """Refuse a folder without a rank's file, or with files of several versions or runs.

    Args:
        ranks: the data-parallel ranks with a file of each kind, `model` and `optim`.

    Raises:
        CheckpointError: naming the ranks or versions.
    """
    counts = [models[0].get("dp_world_size")]
    for table in files:
        counts += _partition_counts(take(table, "optimizer_state_dict", dict, folder))
    world = max((count for count in counts if isinstance(count, int)), default=1)
    is_sharded = models[0].get("param_shapes") is not None
    expected = {"optim": is_sharded, "model": bool(ranks["model"])}
    lacking = (
        f"{kind}_states of rank {rank}"
        for kind, is_cut in expected.items()
        if is_cut
        for rank in range(world)
        if rank not in ranks[kind]
    )
    if missing := list(itertools.islice(lacking, 11)):
        raise CheckpointError(
            "Files of a DeepSpeed checkpoint are missing",
            where=folder,
            expected=f"one of each of {count_of(world, 'rank')}",
            found=f"none for: {', '.join(missing[:10])}{', ...' if missing[10:] else ''}",
            fix="Every rank, on every node, writes its own: bring them all into this folder.",
        )
    beyond = {kind: sorted(rank for rank in numbers if rank >= world) for kind, numbers in ranks.items()}
    surplus = {kind: numbers for kind, numbers in beyond.items() if numbers}
    versions = {shown(table.get("ds_version")) for table in [*models, *files]}
    if surplus or any(count != world for count in counts) or len(versions) > 1:
        raise CheckpointError(
            "The files of a DeepSpeed checkpoint do not belong together",
            where=folder,
            found=f"counts of ranks {sorted(set(map(shown, counts)))}, versions {sorted(versions)}, "
            f"ranks beyond {surplus}",
            fix="The folder may hold an older save of more ranks beside this one; take them apart.",
        )


def _partition_counts(state: Table) -> list[Any]:
    count = state.get("partition_count")
    return list(count) if isinstance(count, Sequence) else [count] if count is not None else []
