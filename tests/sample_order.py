"""The order of samples, an epoch at a time: what `trainer.data.order.sample_ids_at` gives position by position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.data import order


def permute(index: npt.NDArray[np.int64], *, count: int, key: int) -> npt.NDArray[np.int64]:
    """Map each index through the permutation of range(count) for ``key``, without building it.

    Args:
        index: any shape, values in range(count).
        count: at least 1.
        key: any integer; taken modulo 2**64.

    Returns:
        int64, the shape of ``index``.

    Raises:
        ValueError: ``count`` is not positive.
        IndexError: an index is outside range(count).
    """
    if count < 1:
        raise ValueError(f"expected a positive count, found {count}")
    if index.size and (int(index.min()) < 0 or int(index.max()) >= count):
        raise IndexError(f"expected indices in range({count}), found {int(index.min())} to {int(index.max())}")
    flat = index.reshape(-1)
    out = np.empty(flat.shape, dtype=np.int64)
    keys, same = (
        order._round_keys(np.uint64(key & order._MASK_64)),
        np.array([count, *order._sides(count)], dtype=np.uint64),
    )
    for start in range(0, flat.size, order._BLOCK):
        block = slice(start, start + order._BLOCK)
        values = flat[block].astype(np.uint64)
        counts, a, b = np.broadcast_to(same[:, None], (3, values.size))
        out[block] = order._walk(values, np.broadcast_to(keys[:, None], (order._ROUNDS, values.size)), counts, a, b)
    return out.reshape(index.shape)


def sample_ids(first: int, count: int, *, epoch_size: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the samples at the global positions ``first`` to ``first + count - 1``.

    Position p lies in epoch ``p // epoch_size``; every epoch has its own permutation of range(epoch_size), so each
    sample comes exactly once an epoch however the positions are cut into calls.

    Returns:
        int64 of shape [count], values in range(epoch_size).

    Raises:
        ValueError: ``first`` or ``count`` is negative, or ``epoch_size`` is not positive.
    """
    if first < 0 or count < 0:
        raise ValueError(f"expected positions that are not negative, found first {first} and count {count}")
    if epoch_size < 1:
        raise ValueError(f"expected a positive epoch size, found {epoch_size}")
    out = np.empty(count, dtype=np.int64)
    filled = 0
    while filled < count:
        epoch, offset = divmod(first + filled, epoch_size)
        length = min(count - filled, epoch_size - offset)
        index = np.arange(offset, offset + length, dtype=np.int64)
        out[filled : filled + length] = permute(
            index, count=epoch_size, key=int(order._epoch_keys(seed, np.array([epoch]))[0])
        )
        filled += length
    return out
