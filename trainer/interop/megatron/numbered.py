"""Names numbered state from Megatron's optimizer without `--use-distributed-optimizer`.

A rank's parameters are in two groups: with weight decay, and without, for biases and vectors. A group follows
`model.parameters()` order, chunk by chunk. Source: `_get_param_groups` in `megatron/core/optimizer`.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.interop.megatron.shards import Stage
from trainer.interop.megatron.state import MASTERS
from trainer.interop.numbered import Table, entries_by_name
from trainer.interop.source import MOMENTS
from trainer.interop.stored import FileTensor
from trainer.interop.torch_file import is_plain

_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")


def named_state(optimizer: Table, chunks: Sequence[Stage], *, where: object) -> list[dict[str, dict[str, FileTensor]]]:
    """Return moments and master weights by name for each of a rank's chunks.

    Args:
        optimizer: The rank's `optimizer` entry.
        chunks: The rank's weights, a chunk per virtual stage.

    Raises:
        ValueError: Weight copies are missing.
        MismatchError: The shapes do not match the parameters', or the optimizer is not Adam.
    """
    adam = optimizer.get("optimizer", optimizer)
    weights = {(number, name): piece for number, chunk in enumerate(chunks) for name, piece in chunk.items()}
    decayed = [key for key, piece in weights.items() if len(piece.shape) > 1 and not key[1].endswith("bias")]
    vectors = [key for key in weights if key not in set(decayed)]
    masters = next((optimizer[key] for key in _MASTERS if key in optimizer), None)
    table = {number: dict(entry) for number, entry in adam["state"].items()}
    for group, tensors in zip(adam["param_groups"], masters or (), strict=masters is not None):
        if len(tensors) not in (0, len(group["params"])) or not all(map(is_plain, tensors)):
            raise ValueError(f"{len(tensors)} weight copies of {len(group['params'])} parameters")
        for number, tensor in zip(group["params"], tensors, strict=False):
            table.setdefault(number, {})[MASTERS] = tensor
    shapes = {key: piece.shape for key, piece in weights.items()}
    # Both group orders occur. A matrix and a vector never have the same shape.
    orders = [decayed, vectors], [vectors, decayed], [list(weights)]
    entries = entries_by_name({**adam, "state": table}, orders, shapes, program="Megatron", where=where)
    kinds = MOMENTS if masters is None else (*MOMENTS, MASTERS)
    state: list[dict[str, dict[str, FileTensor]]] = [{kind: {} for kind in kinds} for _ in chunks]
    for (chunk, name), entry in entries.items():
        for kind in kinds:  # a float32 parameter has no copy
            state[chunk][kind][name] = FileTensor.of(entry[kind]) if kind in entry else chunks[chunk][name]
    return state
