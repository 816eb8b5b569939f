"""Randomness derived from its purpose, so a resume needs no generator state."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import numpy as np
import torch
import xxhash

from models.config import Initial, InitialKind
from reprise.tensors import LiveTensor

# Tensor rows drawn together. A rank draws only the blocks overlapping its box.
ROWS_PER_BLOCK = 64


def dropout_key(seed: int, iteration: int, *, micro_batch: int) -> int:
    """Return the key from which a forward pass's dropout sites derive their seeds. It has 63 bits, to fit int64.

    Args:
        micro_batch: Its number in the iteration, over all ranks, so masks do not depend on the rank count.
    """
    # The third word was once a rank. It stays 0, so single-rank runs keep their masks.
    return xxhash.xxh3_64_intdigest(struct.pack("<4q", seed, iteration, 0, micro_batch)) >> 1


def fill_initial_values(live: Iterable[LiveTensor], initial: Mapping[str, Initial], seed: int) -> None:
    """Fill live tensors with their initial values: equal bits on every topology, drawn only where needed."""
    for tensor in live:
        rule = initial[tensor.spec.name]
        if tensor.box.numel == 0:
            continue
        if rule.kind in (InitialKind.normal, InitialKind.uniform):
            _fill_random(tensor, rule, seed)
        else:
            tensor.local.fill_(float(rule.kind is InitialKind.ones))


def _fill_random(tensor: LiveTensor, rule: Initial, seed: int) -> None:
    from numpy.random import Generator, Philox  # a resume draws no initial values

    rows, row_shape = tensor.spec.view[0], tensor.spec.view[1:]
    inner = tuple(slice(at, at + size) for at, size in zip(tensor.box.offset[1:], tensor.box.shape[1:], strict=True))
    lo, hi = tensor.box.offset[0], tensor.box.end[0]
    prefix = struct.pack("<q", seed) + tensor.spec.name.encode()
    for block in range(lo // ROWS_PER_BLOCK, -(-hi // ROWS_PER_BLOCK)):
        start = block * ROWS_PER_BLOCK
        count = min(ROWS_PER_BLOCK, rows - start)
        # A counter-based generator with a 128-bit key: torch's CPU generator keeps 32 seed bits, too few for a large
        # model's blocks to differ from each other.
        generator = Generator(Philox(key=xxhash.xxh3_128_intdigest(prefix + struct.pack("<q", block))))
        draw = generator.standard_normal if rule.kind is InitialKind.normal else generator.random
        values = torch.from_numpy(draw((count, *row_shape), dtype=np.float32))
        if rule.kind is InitialKind.uniform:
            values.mul_(2).sub_(1)
        values.mul_(rule.scale)
        first, last = max(lo, start), min(hi, start + count)
        tensor.local[first - lo : last - lo].copy_(values[(slice(first - start, last - start), *inner)])
