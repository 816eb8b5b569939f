"""How ranks agree on one table: which tables travel, and what does not fit together."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from reprise.errors import CheckpointError
from reprise.format.box import Box
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec
from reprise.nested.agreement import KnownTables, agree_on_state
from reprise.nested.table import JointTable, join, table_of
from reprise.ranks.channel import StoreChannel
from reprise.ranks.joint_call import JointCall
from reprise.tensors.live import LiveTensor
from tests.fakes import run_ranks
from tests.messages import refused


def table(
    *names: str,
    rows: int = 0,
    dtype: StoredDtype = StoredDtype.F32,
    aliases: dict[str, str] | None = None,
    patterns: Sequence[str] = (),
) -> bytes:
    """Return the table of a rank that holds two rows, from `rows` on, of tensors of four."""
    specs = [TensorSpec(TensorKind.MODEL, name, (4, 3), dtype, (4, 3)) for name in names]
    live = [LiveTensor(spec, Box((rows, 0), (2, 3)), torch.empty(0), ()) for spec in specs]
    return table_of(live, aliases=aliases or {}, patterns=patterns, is_replicated=False)


def agreed(
    channel: StoreChannel, key: str, mine: bytes, values: object, known: KnownTables
) -> tuple[JointTable, object]:
    call = JointCall(channel, key, "save()", timeout_s=60.0)
    call.announce()
    joint, joined = agree_on_state(
        call, mine, json.dumps({"values": values}).encode(), known, before_decision=lambda: None
    )
    return joint, joined and joined["values"]


def test_tables_travel_only_when_one_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other, same = [table("a"), table("b"), table("b", rows=2)], table("b", "c"), [table("a")] * 3
    values = [{"/epoch": 3}, {"/epoch": 3}, {"/epoch": 3, "/more": 1}]
    store, put = HashStore(), StoreChannel.put
    sent: list[tuple[int, str]] = []

    def count(channel: StoreChannel, key: str, data: bytes) -> list[str]:
        sent.extend([(channel.rank, key[:2])] if b"F32" in data and not channel.coordinates else [])
        return put(channel, key, data)

    monkeypatch.setattr(StoreChannel, "put", count)

    def call(channel: StoreChannel) -> list[object]:
        known, found, last = KnownTables(), [], None
        for number, tables in enumerate([own, own, [own[0], other, own[2]], own, same, same, same]):
            rank = channel.rank
            known = KnownTables() if rank and number == 6 else known  # as after an error on this rank
            joint, joined = agreed(channel, f"k{number}", tables[rank], values[rank], known)
            found.append((len(joint.specs), joint is last, joined))
            last = joint
        return found

    counts = [(2, False), (2, True), (3, False), (2, False), (1, False), (1, True), (1, False)]
    for rank, found in enumerate(run_ranks(3, call, store=lambda: store)):
        expected = None if rank else values[2]
        assert found == [(*count, expected) for count in counts]
    for rank in (1, 2):  # if one is new, each that differs from rank 0's is sent
        assert [sent.count((rank, f"k{number}")) for number in range(7)] == [1, 0, 1, 1, 0, 0, 0]


def test_a_joint_table_has_every_box_with_its_ranks() -> None:
    joint = JointTable.from_text(join({5: table("b", "a10", "a9", aliases={"x": "b"}), 2: table("b", rows=2)}))
    assert [spec.name for spec in joint.specs] == ["a9", "a10", "b"]
    assert joint.holders["b"] == {Box((0, 0), (2, 3)): (5,), Box((2, 0), (2, 3)): (2,)}
    assert joint.aliases == {"x": "b"}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (table("a", dtype=StoredDtype.I8), ["a is F32 [4, 3]", "rank 0", "I8 [4, 3]", "rank 1"]),
        (table("b", aliases={"a": "b"}), ["a is F32 [4, 3] (model) on rank 0 and tied to b on rank 1"]),
        (table("a", "b", aliases={"x": "b"}), ["x is tied to a on rank 0", "tied to b on rank 1"]),
    ],
    ids=["dtype", "own", "tie"],
)
def test_tables_that_contradict_each_other_are_refused(other: bytes, words: list[str]) -> None:
    with refused(CheckpointError, *words):
        join({0: table("a", aliases={"x": "a"}), 1: other})


def test_the_patterns_are_those_of_the_coordinator() -> None:
    own, other = table("a", patterns=["a"]), table("a", patterns=["b"])
    for by_rank, ranks in (({1: own, 0: other}, (0,)), ({0: other, 1: own}, (0, 1))):
        assert [*JointTable.from_text(join(by_rank)).holders["a"].values()] == [ranks]
