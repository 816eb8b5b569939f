"""Locates each parameter in the flat buffers of DeepSpeed's optimizers.

Three layouts are supported (DeepSpeed's `zero/stage_1_and_2.py`, `zero/stage3.py`, `fp16/unfused_optimizer.py`; its
`utils/zero_to_fp32.py` assembles the weights of the first two):

* ZeRO 1 and 2 concatenate the parameters of a group, with padding after each and at the end, and give each rank an
  equal part. The padding at the end is not stored for weights.
* ZeRO 3 cuts every parameter into equal parts, the last padded, and concatenates a rank's parts, in several buffers
  if there are many.
* Stage 0 keeps parameters unsharded, by number; `numbered.py` finds their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from reprise.errors import CheckpointError, MismatchError, count_of
from reprise.json_file import shown, step_count
from trainer.interop.deepspeed.folder import DeepSpeedCheckpoint, Table, take
from trainer.interop.deepspeed.numbered import Numbered, names_of
from trainer.interop.torch_file import is_plain

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS = "weights"

Chain = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class FlatPlace:
    """A parameter's place: extents (chain, first, last + 1) of chains of tensors, end to end, padding last.

    Args:
        step: number of updates by the optimizer; None if it has no moments.
    """

    shape: tuple[int, ...]
    extents: tuple[tuple[int, int, int], ...]
    step: float | None


@dataclass(frozen=True, slots=True)
class Flats:
    """Every parameter's place by name, and the chains of the weights and of each moment, numbered alike."""

    places: dict[str, FlatPlace] = field(default_factory=dict)
    chains: dict[str, list[Chain]] = field(default_factory=lambda: {key: [] for key in (WEIGHTS, *MOMENTS)})

    def read(self, key: str, name: str) -> torch.Tensor:
        """Return a parameter's weights or a moment in its shape; a view if it is contiguous."""
        place = self.places[name]
        pieces = [p for chain, lo, hi in place.extents for p in _cut(self.chains[key][chain], lo, hi)]
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else torch.empty(0)
        return joined[: prod(place.shape)].view(place.shape)

    def add(self, weights: Chain, entries: Sequence[Table] | None, where: object) -> tuple[int, float | None]:
        """Add a chain of weights and the chains of its moments; return its number and its step.

        Args:
            entries: the optimizer's entries for each tensor of the chain; None to leave moments and step out.

        Raises:
            CheckpointError: if the moments are of several steps, or their number differs from the weights'.
            MismatchError: if the optimizer is not a variant of Adam.
        """
        if entries is None:
            self.chains[WEIGHTS].append(weights)
            for key in MOMENTS:  # numbered alike
                self.chains[key].append(())
            return len(self.chains[WEIGHTS]) - 1, None
        moments_of = {key: [_moment(entry, key, where) for entry in entries] for key in MOMENTS}
        steps = {_step(entry, where) for entry in entries}
        if len(steps) != 1:
            raise _of_several_saves(where, steps)
        self.chains[WEIGHTS].append(weights)
        for key, chain in moments_of.items():
            for number, (weight, moment) in enumerate(zip(weights, chain, strict=True)):
                # Of weights alone, what pads the end is not stored, and it may reach over several ranks.
                extra, is_end = (
                    moment.numel() - weight.numel(),
                    not any(later.numel() for later in weights[number + 1 :]),
                )
                if extra < 0 or (extra and not is_end):
                    raise _damaged(where, f"{key} {number}", f"{moment.numel()} numbers for {weight.numel()} weights")
            self.chains[key].append(chain)
        return len(self.chains[WEIGHTS]) - 1, steps.pop()

    def add_whole(self, name: str, shape: tuple[int, ...], fragments: Chain) -> None:
        """Add a parameter without moments."""
        # Chains of moments are counted alike: those of the optimizer come first.
        self.chains[WEIGHTS].append(fragments)
        self.places[name] = FlatPlace(shape, ((len(self.chains[WEIGHTS]) - 1, 0, prod(shape)),), None)

    def check(self, where: object) -> None:
        """Refuse places beyond the ends of their chains.

        Raises:
            CheckpointError: naming the first.
        """
        lengths = {key: [sum(t.numel() for t in chain) for chain in chains] for key, chains in self.chains.items()}
        for name, place in self.places.items():
            for key in (WEIGHTS, *(MOMENTS if place.step is not None else ())):
                filled = sum(max(0, min(hi, lengths[key][chain]) - lo) for chain, lo, hi in place.extents)
                if filled < prod(place.shape):
                    raise CheckpointError(
                        "A buffer of DeepSpeed is shorter than its parameters",
                        where=f"{where}, {key} of {name}",
                        expected=f"{prod(place.shape)} numbers",
                        found=filled,
                        fix="The files are damaged, or of several saves.",
                    )


@dataclass(frozen=True, slots=True)
class Unsharded:
    """The unsharded content of the model file; empty at stage 3.

    Args:
        weights: by name, a shared weight once, in the module's order.
        shared: second names of shared weights, with the first.
    """

    weights: Mapping[str, torch.Tensor]
    shared: Mapping[str, str]


def locate(
    saved: DeepSpeedCheckpoint, unsharded: Unsharded, *, listed_names: Sequence[str] | None, weights_only: bool
) -> Flats:
    """Return every parameter's place; a parameter in no optimizer lies in the model's own files.

    Args:
        listed_names: the names of the optimizer's parameters at stage 0, in its order, as listed by the user.
        weights_only: whether to ignore moments.

    Raises:
        CheckpointError: if an entry is missing or malformed.
        MismatchError: if the optimizer is not a variant of Adam, or moments cannot be assigned with certainty.
    """
    flats = Flats()
    if saved.is_stage_3:
        _locate_stage_3(flats, saved, weights_only=weights_only)
    elif saved.optimizers:
        _locate_stages_1_and_2(flats, saved, weights_only=weights_only)
    elif not weights_only:
        _locate_numbered(flats, saved, unsharded, listed_names)
    for name, tensor in unsharded.weights.items():
        if name not in flats.places:
            flats.add_whole(name, tuple(tensor.shape), [tensor])
    if saved.is_stage_3:
        _add_frozen_parts(flats, saved)
    flats.check(saved.path)
    return flats


def _locate_stages_1_and_2(flats: Flats, saved: DeepSpeedCheckpoint, *, weights_only: bool) -> None:
    """Find the parameters of ZeRO 1 and 2."""
    path = saved.path
    optimizers = () if weights_only else saved.optimizers
    entries = [_entries(state, "base_optimizer_state", path) for state in optimizers]
    buffers = [_tensors(state, "single_partition_of_fp32_groups", path) for state in saved.optimizers]
    groups = _shapes(saved.models[0], "param_shapes", path)
    none = [[0] * len(group) for group in groups]
    # Not recorded by versions that have no such padding.
    paddings: list[list[int]] = saved.optimizers[0].get("param_alignment_paddings") or none
    counts = [*map(len, entries), *map(len, buffers)]
    if set(counts) != {len(groups)} or [len(group) for group in paddings] != [len(group) for group in none]:
        raise _of_several_saves(path, {count_of(count, "group") for count in (*counts, len(paddings), len(groups))})
    for number, group in enumerate(groups):
        moments = None if weights_only else [e[number] for e in entries]
        chain, step = flats.add([b[number] for b in buffers], moments, path)
        offset = 0
        for (name, shape), padding in zip(group.items(), paddings[number], strict=True):
            flats.places[name] = FlatPlace(shape, ((chain, offset, offset + prod(shape)),), step)
            offset += prod(shape) + padding


def _locate_stage_3(flats: Flats, saved: DeepSpeedCheckpoint, *, weights_only: bool) -> None:
    """Find the parameters of ZeRO 3: a chain is the buffers of a rank."""
    path, steps = saved.path, set[float | None]()
    for state in saved.optimizers:
        buffers = _tensors(state, "fp32_flat_groups", path)
        entries = None if weights_only else _entries(state, "optimizer_state_dict", path)
        if entries is not None and len(buffers) != len(entries):
            number = len(entries)
            listed = f"{number} {'entry' if number == 1 else 'entries'} of optimizer_state_dict"
            raise _of_several_saves(path, {count_of(len(buffers), "buffer"), listed})
        steps.add(flats.add(buffers, entries, path)[1])
    if len(steps) > 1:
        raise _of_several_saves(path, steps)
    step, offset = steps.pop(), 0
    for group in _shapes(saved.models[0], "param_shapes", path):
        for name, shape in group.items():
            part = _part(shape, saved)
            extents = tuple((rank, offset, offset + part) for rank in range(len(saved.optimizers)))
            flats.places[name] = FlatPlace(shape, extents, step)
            offset += part
    lengths = {sum(tensor.numel() for tensor in chain) for chain in flats.chains[WEIGHTS]}
    if lengths != {offset}:
        raise CheckpointError(
            "A rank's buffers are not as long as its parts of the parameters",
            where=path,
            expected=f"{offset} numbers",
            found=sorted(lengths),
            fix="The files are damaged, or DeepSpeed cut the parameters over fewer ranks.",
        )


def _add_frozen_parts(flats: Flats, saved: DeepSpeedCheckpoint) -> None:
    """Find the parameters cut by ZeRO 3 and held by no optimizer."""
    path = saved.path
    if not saved.models[0].get("frozen_param_shapes"):
        return
    (shapes,) = _shapes({"frozen": [saved.models[0]["frozen_param_shapes"]]}, "frozen", path)
    tables = [take(model, "frozen_param_fragments", dict, path) for model in saved.models]
    for name, shape in shapes.items():
        fragments = [take(table, name, torch.Tensor, path) for table in tables]
        if not all(map(is_plain, fragments)):
            raise _damaged(path, f"frozen_param_fragments {name}", "something else than tensors of floating point")
        flats.add_whole(name, shape, fragments)


def _locate_numbered(
    flats: Flats, saved: DeepSpeedCheckpoint, unsharded: Unsharded, listed_names: Sequence[str] | None
) -> None:
    """Find the parameters of stage 0; none if no optimizer was saved."""
    path = saved.path
    if saved.models[0].get("optimizer") is None:
        return
    optimizer = take(saved.models[0], "optimizer", dict, path)
    if "fp32_groups_flat" in optimizer:
        raise MismatchError(
            "Moments of stage 0 that lie end to end are not read",
            where=path,
            expected="moments of each parameter",
            found="fp32_groups_flat, of DeepSpeed's wrapper of a fused Adam",
            fix="Take the weights alone with --weights-only.",
        )
    table, key = (
        (optimizer, "optimizer_state_dict") if "optimizer_state_dict" in optimizer else (saved.models[0], "optimizer")
    )
    entries = _entries(table, key, path)
    copies = [_tensors({"fp32_groups": group}, "fp32_groups", path) for group in optimizer.get("fp32_groups") or []]
    numbered = _numbered(take(table, key, dict, path), entries, copies, path)
    names = names_of(numbered, unsharded.weights, unsharded.shared, listed_names, where=path)
    for number, (name, shape) in enumerate(zip(names, numbered.shapes, strict=True)):
        weights = numbered.copies[number] if numbered.copies else unsharded.weights[name]
        chain, step = flats.add([weights], [entries[number]], path)
        flats.places[name] = FlatPlace(shape, ((chain, 0, prod(shape)),), step)


def _numbered(table: Table, entries: Sequence[Table], copies: Sequence[Chain], where: object) -> Numbered:
    groups = take(table, "param_groups", list, where)
    numbers = [number for group in groups for number in take(group, "params", list, where)]
    if numbers != list(range(len(entries))):
        raise _damaged(where, "param_groups", "numbers that are not in order")
    counts = [len(group["params"]) for group in groups]
    if copies and [len(group) for group in copies] != counts:
        raise _of_several_saves(
            where, {count_of(count, "parameter") for count in (len(entries), sum(map(len, copies)))}
        )
    recorded = [group.get("param_names") for group in groups]
    is_named = all(
        isinstance(names, list) and len(names) == count and all(isinstance(name, str) for name in names)
        for names, count in zip(recorded, counts, strict=True)
    )
    return Numbered(
        [tuple(_moment(entry, "exp_avg", where).shape) for entry in entries],
        [tensor for group in copies for tensor in group],
        [name for names in recorded for name in names or ()] if is_named else None,
    )


def _cut(chain: Chain, lo: int, hi: int) -> Iterator[torch.Tensor]:
    """Yield the extents from `lo` to `hi` of concatenated tensors."""
    start = 0
    for tensor in chain:
        end = start + tensor.numel()
        if start < hi and lo < end:
            yield tensor.reshape(-1)[max(lo - start, 0) : min(hi, end) - start]
        start = end


def _part(shape: tuple[int, ...], saved: DeepSpeedCheckpoint) -> int:
    return -(-prod(shape) // len(saved.optimizers))


def _shapes(table: Table, key: str, where: object) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the parameters of each group, in storage order."""
    groups = take(table, key, list, where)
    try:
        shapes = [{str(name): tuple(map(int, shape)) for name, shape in group.items()} for group in groups]
    except (AttributeError, TypeError, ValueError) as error:
        raise _damaged(where, key, str(error)[:200]) from error
    if any(size < 0 for group in shapes for shape in group.values() for size in shape):
        raise _damaged(where, key, "a size below 0")
    return shapes


def _tensors(table: Table, key: str, where: object) -> list[torch.Tensor]:
    tensors = take(table, key, list, where)
    if not all(map(is_plain, tensors)):
        raise _damaged(where, key, "something else than tensors of floating point")
    return list(tensors)


def _entries(state: Table, key: str, where: object) -> list[Table]:
    """Return the state of an optimizer's parameters by number, each with its `step`."""
    parameters = state.get(key)
    if isinstance(parameters, list):  # an elastic checkpoint has no groups
        return [{"step": state.get("base_optimizer_state_step"), **entry} for entry in parameters]
    table = take(state, key, dict, where)
    by_number = take(table, "state", dict, where)
    groups = take(table, "param_groups", list, where)
    steps = [group.get("step") for group in groups for _ in take(group, "params", list, where)]
    if set(by_number) != set(range(len(steps))):
        raise MismatchError(
            "The optimizer has no moments of some parameters",
            where=where,
            expected=f"those of {len(steps)}",
            found=f"those of {len(by_number)}",
            fix="It was saved before the first step, or holds parameters that are not used. Take the weights alone "
            "with --weights-only.",
        )
    return [{"step": step, **by_number[number]} for number, step in enumerate(steps)]


def _moment(entry: Table, key: str, where: object) -> torch.Tensor:
    tensor = entry.get(key)
    if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
        raise MismatchError(
            "The optimizer is not Adam",
            where=where,
            expected=" and ".join(MOMENTS),
            found=", ".join(map(str, entry)),
            fix="Only the moments of Adam and AdamW are imported. Take the weights alone with --weights-only.",
        )
    return tensor


def _step(entry: Table, where: object) -> float:
    step = entry.get("step")
    if isinstance(step, torch.Tensor) and step.numel() == 1:
        step = step.item()
    try:
        return step_count(step)
    except ValueError as error:
        raise _damaged(where, "step", shown(step)) from error


def _damaged(where: object, key: str, actual: str) -> CheckpointError:
    return CheckpointError("An entry of a DeepSpeed file makes no sense", where=f"{where}, {key}", found=actual)


def _of_several_saves(where: object, values: Iterable[object]) -> CheckpointError:
    return CheckpointError(
        "The files of a DeepSpeed checkpoint are of several saves", where=where, found=sorted(map(str, values))
    )
