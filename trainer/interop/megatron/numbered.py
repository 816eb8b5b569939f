"""Names numbered state from Megatron's optimizer without `--use-distributed-optimizer`.

A rank's parameters are in two groups: with weight decay, and without, for biases and vectors. A group follows
`model.parameters()` order, chunk by chunk. Source: `_get_param_groups` in `megatron/core/optimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reprise.errors import CheckpointError, MismatchError
from trainer.interop.megatron.shards import RankPiece, Stage
from trainer.interop.megatron.state import MASTERS, MOMENTS, parameter_groups
from trainer.interop.numbered import Table, unknown_order
from trainer.interop.torch_file import is_plain

_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")


def named_state(optimizer: Table, chunks: Sequence[Stage], *, where: object) -> list[dict[str, dict[str, RankPiece]]]:
    """Return moments and master weights by name for each of a rank's chunks.

    Args:
        optimizer: The rank's `optimizer` entry.
        chunks: The rank's weights, a chunk per virtual stage.

    Raises:
        CheckpointError: Weight copies are missing.
        MismatchError: The shapes do not match the parameters', or the optimizer is not Adam.
    """
    groups, state = parameter_groups(optimizer), optimizer.get("optimizer", optimizer)["state"]
    every = [(number, name) for number, chunk in enumerate(chunks) for name in chunk]
    ordered = _ordered(groups, state, every, chunks, where=where)
    state_of_chunks: list[dict[str, dict[str, RankPiece]]] = [{key: {} for key in MOMENTS} for _ in chunks]
    for number, (chunk, name) in ordered.items():
        for key in MOMENTS:
            state_of_chunks[chunk][key][name] = RankPiece.of(state[number][key])
    masters = next((optimizer[key] for key in _MASTERS if key in optimizer), None)
    if masters is not None:
        copies = _copies(masters, groups, where=where)
        for chunk_state in state_of_chunks:
            chunk_state[MASTERS] = {}
        for number, (chunk, name) in ordered.items():
            copy = copies.get(number)
            # A float32 parameter has no copy.
            state_of_chunks[chunk][MASTERS][name] = chunks[chunk][name] if copy is None else RankPiece.of(copy)
    return state_of_chunks


def _ordered(
    groups: Sequence[Table],
    state: Table,
    every: Sequence[tuple[int, str]],
    chunks: Sequence[Stage],
    *,
    where: object,
) -> dict[int, tuple[int, str]]:
    """Return every numbered parameter's chunk and name, in the first order fitting groups and shapes."""
    numbers = [list(group.get("params", ())) for group in groups]
    entries = {n: state.get(n) for group in numbers for n in group}
    if incomplete := [n for n, entry in entries.items() if not _is_adam(entry)]:
        raise MismatchError(
            "The optimizer lacks moments for some parameters, or is not Adam",
            where=where,
            expected=" and ".join(MOMENTS),
            found=f"{len(incomplete)} of {len(entries)} without them, the first is number {incomplete[0]}",
            fix="Import the weights alone with --weights-only.",
        )
    decayed = [parameter for parameter in every if decays(parameter[1], chunks[parameter[0]][parameter[1]])]
    undecayed = [parameter for parameter in every if not decays(parameter[1], chunks[parameter[0]][parameter[1]])]
    filled = [members for members in numbers if members]
    # Both group orders occur. A matrix and a vector never have the same shape.
    for groupings in ([decayed, undecayed], [undecayed, decayed], [every]):
        order = dict(zip(entries, (parameter for group in groupings for parameter in group), strict=False))
        sizes = [len(group) for group in groupings if group]
        if sizes == [len(members) for members in filled] and all(
            tuple(state[number][key].shape) == chunks[chunk][name].shape
            for number, (chunk, name) in order.items()
            for key in MOMENTS
        ):
            return order
    raise unknown_order(
        "Megatron",
        groups,
        expected=f"two groups: {len(decayed)} matrices, {len(undecayed)} biases and vectors, in the model's shapes",
        fix="Parameters were frozen or grouped differently.",
        where=where,
    )


def decays(name: str, piece: RankPiece) -> bool:
    """Return whether weight decay applies to a parameter."""
    return len(piece.shape) > 1 and not name.endswith("bias")


def _is_adam(entry: object) -> bool:
    return isinstance(entry, Mapping) and all(is_plain(entry.get(key)) for key in MOMENTS)


def _copies(masters: Any, groups: Sequence[Table], *, where: object) -> dict[int, torch.Tensor]:
    """Return the master weights by number."""
    copies = dict[int, torch.Tensor]()
    for group, tensors in zip(groups, masters, strict=True):
        numbers = list(group.get("params", ()))
        if len(tensors) not in (0, len(numbers)) or not all(map(is_plain, tensors)):
            raise CheckpointError("Weight copies are missing", where=where, expected=len(numbers), found=len(tensors))
        copies |= dict(zip(numbers, (tensor.detach() for tensor in tensors), strict=False))
    return copies
