"""Digests of replicas are of the bytes at the moment of the save, whoever computes them and when."""

from __future__ import annotations

import threading

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from reprise.commit.inventory import SharedDigests
from reprise.format.manifest import DIGEST_BYTES, Written, WrittenPiece
from reprise.saving.plan import Plan, make_plan
from reprise.saving.replica_digests import ReplicaDigests, blocks_of, checksum
from reprise.tensors.live import Contents, LiveTensor
from reprise.tensors.memory import HostMemory, Memory, memory_of
from tests.fakes import JOIN_S, Axis, Sharding, sample_specs, sample_state

SPECS = sample_specs()
STATE = sample_state(SPECS, seed=3)
SHARDINGS = (
    Sharding("3 replicas", (Axis("replica", 3),)),
    Sharding("replicas of rows", (Axis("replica", 2), Axis("row", 2))),
    Sharding("replicas of columns", (Axis("replica", 2), Axis("column", 2))),
)


def plan_of(live: list[LiveTensor], rank: int) -> Plan:
    contents = Contents(tuple(SPECS), tuple(live))
    return make_plan(contents, rank=rank, file_bytes=1 << 20, is_overtaken=False)


def begun(plan: Plan) -> ReplicaDigests:
    memory = {**plan.sources.begin(), **plan.watched.steady}
    return ReplicaDigests(plan.shared, plan.pieces, memory, plan.watched.changing())


def written_by(plan: Plan, live: list[LiveTensor]) -> Written:
    """Return what a writer reports of its own pieces."""
    images = {tensor.spec.name: memory_of(tensor.local) for tensor in live}
    pieces = []
    for piece in plan.pieces:
        data = [images[block.name][block.lo : block.hi] for block in blocks_of(piece)]
        digests = b"".join(xxhash.xxh3_64_intdigest(block).to_bytes(DIGEST_BYTES, "big") for block in data)
        pieces.append(WrittenPiece(piece.name, piece.box, piece.lo, piece.hi, digests))
    return Written(pieces, 0)


def digests_of_all(sharding: Sharding, spoil: tuple[int, str] | None = None) -> list[SharedDigests]:
    """Return what each rank finds; `spoil` names a rank and a tensor of which its last byte is another."""
    found = []
    for rank in range(sharding.world_size):
        live = sharding.live(rank, SPECS, STATE)
        for tensor in live:
            if spoil == (rank, tensor.spec.name):
                tensor.local.view(-1).view(torch.uint8)[-1] ^= 1
        plan = plan_of(live, rank)
        replicas = begun(plan)
        replicas.run()
        found.append(replicas.all(written_by(plan, live)))
    return found


@pytest.mark.parametrize("sharding", SHARDINGS, ids=lambda s: s.name)
def test_replicas_agree_and_a_single_differing_bit_is_seen(sharding: Sharding) -> None:
    found = digests_of_all(sharding)
    for group in {group for digests in found for group in digests}:
        members = [found[rank][group] for rank in group]
        assert all(member == members[0] for member in members)
    group = next(group for group, tensors in found[0].items() if "embedding" in tensors)
    assert len(group) > 1
    spoiled = digests_of_all(sharding, (group[1], "embedding"))
    assert spoiled[group[0]][group]["embedding"] != spoiled[group[1]][group]["embedding"]
    assert spoiled[group[0]][group]["exp_avg.embedding"] == spoiled[group[1]][group]["exp_avg.embedding"]


@pytest.mark.parametrize("is_beside", [False, True])
def test_what_changes_after_release_is_not_digested(is_beside: bool) -> None:
    """Each block is digested once, by the step that waits or by a thread beside it."""
    live = SHARDINGS[0].live(1, SPECS, STATE)
    expected, plan = digests_of_all(SHARDINGS[0])[1], plan_of(live, 1)
    replicas, written = begun(plan), written_by(plan, live)
    thread = threading.Thread(target=replicas.run)
    if is_beside:
        thread.start()
    replicas.release()
    for tensor in live:
        tensor.local.zero_()
    if not is_beside:
        thread.start()
    thread.join(JOIN_S)
    assert replicas.all(written) == expected
    assert replicas.blocked_s > 0


class LostMemory(HostMemory):
    """Memory whose bytes cannot be had."""

    def __init__(self) -> None:
        pass

    @property
    def address(self) -> int:  # type: ignore[override]
        raise MemoryError("gone")


def test_a_block_that_cannot_be_digested_holds_no_step() -> None:
    live = SHARDINGS[0].live(2, SPECS, STATE)
    plan = plan_of(live, 2)
    lost: dict[str, Memory] = {name: LostMemory() for tensors in plan.shared.values() for name in tensors}
    replicas = ReplicaDigests(plan.shared, plan.pieces, lost, {})
    failures = 0
    while True:
        try:
            replicas.run()
            break
        except MemoryError:
            failures += 1
    assert failures > 1
    thread = threading.Thread(target=replicas.release, daemon=True)
    thread.start()
    thread.join(JOIN_S)
    assert not thread.is_alive()


@given(st.binary(min_size=1, max_size=70), st.data())
def test_a_checksum_sees_every_flipped_bit(data: bytes, draw: st.DataObject) -> None:
    original = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    changed = original.clone()
    changed[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert int(checksum(original)) == int(checksum(original.clone()))
    assert int(checksum(original)) != int(checksum(changed))
