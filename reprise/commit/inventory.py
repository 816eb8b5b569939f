"""One rank's view of a checkpoint: all tensors, the boxes of this rank, and the digests of its replicas."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from reprise.commit.report import GroupDigest
from reprise.format.layout import Layout
from reprise.tensors.live import LiveTensor

# By set of ranks that hold the same boxes, then by tensor: the digest of the box.
SharedDigests = Mapping[tuple[int, ...], Mapping[str, bytes]]


class Inventory:
    """The table behind a rank's offer. Offers carry its digests; the table is sent only if two ranks disagree.

    Args:
        live: the tensor parts that this rank holds.
        shared: the digests of this rank's replicas; empty where they are not compared.
        layout: the layout of all tensors of the checkpoint, as this rank computes it; None without a checkpoint.
    """

    def __init__(self, live: Sequence[LiveTensor], shared: SharedDigests, layout: Layout | None = None) -> None:
        self._live = {tensor.spec.name: tensor for tensor in live}
        self._shared, self._places = shared, {} if layout is None else layout.places

    @property
    def identity(self) -> int:
        """Return the digest (xxh3-64) of all names, kinds, dtypes, shapes and places of the layout."""
        digest = xxhash.xxh3_64()
        for name, place in self._places.items():  # row by row: the text of all would hold up other threads
            spec = place.spec
            row = spec.kind.value, name, spec.dtype.name, spec.shape, spec.view, place.file
            digest.update(repr(row).encode())
        return digest.intdigest()

    def groups(self) -> tuple[GroupDigest, ...]:
        """Return one row for each set of ranks that share boxes."""
        return tuple(
            GroupDigest(
                digest_of_ranks(ranks),
                len(ranks),
                xxhash.xxh3_64_intdigest(repr([(name, self._live[name].box) for name in digests]).encode()),
                xxhash.xxh3_64_intdigest(b"".join(digests.values())),
            )
            for ranks, digests in self._shared.items()
        )

    def to_bytes(self) -> bytes:
        """Return the whole table as JSON: a row for each tensor of the checkpoint, in order."""
        digests = {name: digest for names in self._shared.values() for name, digest in names.items()}
        return json.dumps([self._row(name, digests.get(name)) for name in self._places or self._live]).encode()

    def _row(self, name: str, blocks: bytes | None) -> dict[str, Any]:
        place, tensor = self._places.get(name), self._live.get(name)
        spec = self._live[name].spec if place is None else place.spec
        row: dict[str, Any] = {"name": name, "kind": spec.kind.value, "dtype": spec.dtype.name, "shape": spec.shape}
        if place is not None:
            row["file"] = place.file
        if tensor is not None:
            row |= {"offset": tensor.box.offset, "box": tensor.box.shape, "ranks": tensor.replicas}
        if blocks is not None:
            row["digest"] = f"{xxhash.xxh3_64_intdigest(blocks):016x}"
        return row


def digest_of_ranks(ranks: Sequence[int]) -> int:
    """Return the digest (xxh3-64) of a set of ranks in ascending order."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(ranks)}Q", *ranks))
