"""Writes the weighted mean of a run's checkpoints as a weights-only checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from reprise import saving
from reprise.errors import CheckpointError, ConfigError, MismatchError
from reprise.format import (
    DEFAULT_FILE_BYTES,
    INDEX,
    INTERIM,
    STATE,
    StoredDtype,
    TensorKind,
    TensorSpec,
    WrittenPiece,
    build_layout,
)
from reprise.loading import Checkpoint, LoadSource, no_folder, open_checkpoint, read_file, read_places
from reprise.storage import WEIGHTS, CheckpointFolder, Document, Files, Json, is_dir
from trainer.interop.source import tensor_reader
from trainer.interop.tensor_files import write_tensor_files

MERGED = "merged"  # key in trainer_state.json
_KINDS = (TensorKind.MODEL, TensorKind.ADAPTER)
_AVERAGED = (StoredDtype.F64, StoredDtype.F32, StoredDtype.F16, StoredDtype.BF16)
_RULES = "mean, ema:D with 0 < D < 1, minus-sqrt, or a number for each checkpoint, joined by commas"


@dataclass(frozen=True, slots=True)
class MergeReport:
    """A mean of checkpoints, and its parts from oldest to newest.

    Args:
        path: The written checkpoint's folder.
        shares: Each part's share. They sum to 1.
    """

    path: Path
    parts: tuple[Path, ...]
    shares: tuple[float, ...]


def factors_of(rule: str, count: int) -> list[float]:
    """Return factors for `count` checkpoints, oldest first. They need not sum to 1.

    Args:
        rule: `mean`; `ema:D`, a moving average with decay D, starting with the oldest; `minus-sqrt`, which scales the
            updates between checkpoints like a learning rate decaying from 1 to 0 as `1 - sqrt`; or the factors, joined
            by commas.

    Raises:
        ConfigError: The rule is unknown, the factor count is wrong, or the factors sum to 0.
    """
    name, _, value = rule.partition(":")
    try:
        if rule == "mean":
            factors = [1.0] * count
        elif rule == "minus-sqrt":
            factors = [math.sqrt((i + 1) / count) - math.sqrt(i / count) for i in range(count)]
        elif name == "ema" and 0 < (decay := float(value)) < 1:
            factors = [decay ** (count - 1), *((1 - decay) * decay ** (count - 1 - i) for i in range(1, count))]
        else:
            factors = [float(factor) for factor in rule.split(",")]
    except ValueError:
        raise ConfigError("The weighting rule is unknown", expected=_RULES, found=rule) from None
    if len(factors) != count:
        raise ConfigError("A merge needs a factor per checkpoint", expected=f"{count} factors", found=len(factors))
    if not math.isfinite(math.fsum(factors)) or math.fsum(factors) == 0:
        raise ConfigError("Merge factors must be finite, with a nonzero sum", found=rule)
    return factors


def merge(run: Path, out: Path, *, first: int, last: int, rule: str, files: Files) -> MergeReport:
    """Write the mean of a run's checkpoints from iteration `first` to `last` into `out`, under the newest's number.

    The tensors are weights or adapters, without optimizer state. Each is summed in float64, oldest checkpoint first,
    divided by the factors' sum, and rounded once to its dtype. Two tensors are in memory at a time. Tensors without
    floating-point numbers come from the newest checkpoint.

    Args:
        run: A run folder or its checkpoint folder. For weights-only saves, `checkpoints/weights` in the run folder.
        out: The checkpoint folder to write to. It is created if missing.
        rule: See `factors_of`.

    Raises:
        ConfigError: The rule is wrong, or `out` is one of the run's folders.
        MismatchError: The checkpoints hold different models or bases.
        CheckpointError: There are fewer than two checkpoints, one is damaged or holds state dict tensors, or the output
            cannot be written.
    """
    parts = _parts(run, out, first, last, files)
    factors = factors_of(rule, len(parts))
    specs = _specs(parts)
    newest, sum_of_factors = parts[-1], math.fsum(factors)
    readers = [tensor_reader(part) for part in parts]
    layout = build_layout(specs, file_bytes=DEFAULT_FILE_BYTES)

    def read(name: str) -> torch.Tensor:
        if layout.places[name].spec.dtype not in _AVERAGED:
            return readers[-1](name)
        return weighted_mean([partial(read, name) for read in readers], factors)

    def write(target: Path) -> list[WrittenPiece]:
        return write_tensor_files(target, files, layout, read)

    shares = [factor / sum_of_factors for factor in factors]
    aliases = {name: stored for name, stored in newest.manifest.aliases.items() if stored in layout.places}
    folder = CheckpointFolder(out, files)
    documents = _documents(parts, shares, rule)
    path = saving.write_checkpoint(folder, newest.iteration, layout, write, documents=documents, aliases=aliases)
    return MergeReport(path, tuple(part.path for part in parts), tuple(shares))


def weighted_mean(reads: Sequence[Callable[[], torch.Tensor]], factors: Sequence[float]) -> torch.Tensor:
    """Return the factor-weighted sum of tensors, in this order, divided by the factors' sum, in float64.

    Args:
        reads: Functions returning tensors with equal shapes. Each is called once. In memory are only the sum and a
            single tensor, also in float64.
    """
    total = reads[0]().double().mul_(factors[0])
    for read, factor in zip(reads[1:], factors[1:], strict=True):
        total.add_(read().double().mul_(factor))
    return total.div_(math.fsum(factors))


def _parts(run: Path, out: Path, first: int, last: int, files: Files) -> list[Checkpoint]:
    """Return the checkpoints to merge, oldest first."""
    if not is_dir(run):
        raise no_folder(run)
    folder = CheckpointFolder(LoadSource.named(run).path, files)
    if out.resolve() in (path.resolve() for path in (run, folder.root, folder.root / WEIGHTS)):
        raise ConfigError("The output folder belongs to the run", where=out, fix="Choose another folder.")
    committed = folder.committed()
    iterations = [iteration for iteration in committed if first <= iteration <= last]
    if len(iterations) < 2:
        raise CheckpointError(
            "A merge needs at least two checkpoints",
            where=folder.root,
            expected=f"iterations from {first} to {last}",
            found=", ".join(map(str, committed)) or "none",
            fix="Correct --from and --to.",
        )
    return [open_checkpoint(folder.iteration(iteration), files) for iteration in iterations]


def _specs(parts: Sequence[Checkpoint]) -> list[TensorSpec]:
    """Return the tensors shared by the checkpoints, in the newest checkpoint's file order."""
    newest, expected = parts[-1], _saved(parts[-1])
    if strange := [name for name, spec in expected.items() if spec.kind not in _KINDS]:
        raise CheckpointError(
            "A checkpoint holds state dict tensors, which cannot be averaged",
            where=newest.path,
            found=strange[0],
            fix="Merge checkpoints that hold weights, with or without an optimizer.",
        )
    for part in parts[:-1]:
        saved = _saved(part)
        members = [name for name in ("model", "base") if part.state.get(name) != newest.state.get(name)]
        names = [name for name in {**expected, **saved} if saved.get(name) != expected.get(name)]
        if differences := [*(f"`{name}` in {STATE}" for name in members), *(f"tensor {name}" for name in names)]:
            raise MismatchError(
                "The checkpoints to merge hold different models",
                where=part.path,
                expected=f"the model in {newest.path.name}",
                found=f"another {differences[0]}",
                fix="Correct --from and --to.",
            )
    return list(expected.values())


def _saved(part: Checkpoint) -> dict[str, TensorSpec]:
    """Return a checkpoint's tensors without optimizer state, in file order."""
    places = sorted(read_places(part).values(), key=lambda place: (place.file, place.offset))
    return {place.spec.name: place.spec for place in places if place.spec.kind is not TensorKind.OPTIMIZER}


def _documents(parts: Sequence[Checkpoint], shares: Sequence[float], rule: str) -> dict[str, Document]:
    """Return the newest checkpoint's files without tensors. Its state names the merged parts."""
    newest = parts[-1]
    names = [name for name, entry in newest.manifest.files.items() if not entry.is_tensor_file]
    documents: dict[str, Document] = {name: read_file(newest, name) for name in names if name not in (INDEX, STATE)}
    members: list[Json] = [
        {"iteration": part.iteration, "share": share, "manifest_xxh3_64": part.digest}
        for part, share in zip(parts, shares, strict=True)
    ]
    state = {name: value for name, value in newest.state.items() if name not in (INTERIM, "owes_evaluation")}
    if "valid_loss" in state:
        state["valid_loss"] = None  # it belonged to other weights
    return {**documents, STATE: {**state, MERGED: {"weights": rule, "of": members}}}
