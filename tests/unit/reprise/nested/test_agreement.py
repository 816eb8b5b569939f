"""How ranks agree on one table: which tables travel, and what does not fit together."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from reprise.errors import CheckpointError
from reprise.format.box import Box
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec
from reprise.nested import agreement
from reprise.nested.agreement import KnownTables, agree_on_state
from reprise.nested.documents import NestedValues
from reprise.nested.table import JointTable, Table, TableRow, join
from reprise.ranks.channel import StoreChannel
from reprise.ranks.joint_call import JointCall
from tests.fakes import run_ranks
from tests.messages import refused


def table(
    *names: str, rows: int = 0, dtype: StoredDtype = StoredDtype.F32, aliases: dict[str, str] | None = None
) -> Table:
    """Return the table of a rank that holds two rows, from `rows` on, of tensors of four."""
    specs = [TensorSpec(TensorKind.MODEL, name, (4, 3), dtype, (4, 3)) for name in names]
    return Table({spec.name: TableRow(spec, Box((rows, 0), (2, 3))) for spec in specs}, aliases or {}, ["model"])


def called(channel: StoreChannel, key: str) -> JointCall:
    return JointCall(channel, key, "save()", timeout_s=60.0)


def agreed(tables: list[list[Table]], values: list[NestedValues]) -> list[list[object]]:
    """Return what three ranks know after each of several agreements: names, exchanged tables, values of the first."""
    store = HashStore()

    def call(channel: StoreChannel) -> list[object]:
        known, found, last = KnownTables(), [], None
        for number, mine in enumerate(tables):
            joint, joined = agree_on_state(
                called(channel, f"k{number}"), mine[channel.rank], values[channel.rank], known
            )
            found.append((len(joint.specs), known.exchanged, joint is last, joined.values))
            last = joint
        return found

    return run_ranks(3, call, store=lambda: store)  # type: ignore[return-value]


# What rank 0 has received, and each other rank sent, after each agreement. A large table is asked for, unless another
# rank has sent one of that digest; a small one is part of the first message of a rank.
EXCHANGED = {
    "large": [[2, 2, 3, 4, 4, 4], [1, 1, 2, 3, 3, 3], [1, 1, 1, 1, 1, 1]],
    "small": [[2, 2, 3, 4, 6, 6], [1, 1, 2, 3, 4, 4], [1, 1, 1, 1, 2, 2]],
}


@pytest.mark.parametrize("size", ["large", "small"])
def test_tables_travel_only_when_one_is_new(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if size == "large":
        monkeypatch.setattr(agreement, "SMALL_TABLE_BYTES", 0)
        monkeypatch.setattr(agreement, "SMALL_VALUES_BYTES", 0)
    own = [table("a"), table("b"), table("b", rows=2)]
    more = [table("a"), table("b", "c"), table("b", rows=2)]
    same = [table("a")] * 3
    values = [NestedValues({"/epoch": 3}), NestedValues({"/epoch": 3}), NestedValues({"/epoch": 3, "/more": 1})]
    found = agreed([own, own, more, own, same, same], values)
    everything, mine = {"/epoch": 3, "/more": 1}, {"/epoch": 3}
    counts = [(2, False), (2, True), (3, False), (2, False), (1, False), (1, True)]
    for rank, exchanged in enumerate(EXCHANGED[size]):
        expected = everything if rank in (0, 2) else mine
        assert found[rank] == [
            (names, sent, is_same, expected) for (names, is_same), sent in zip(counts, exchanged, strict=True)
        ]


def test_a_joint_table_is_the_same_after_a_message() -> None:
    joint = join({5: table("b", "a10", "a9", aliases={"x": "b"}), 2: table("b", rows=2)})
    assert [spec.name for spec in joint.specs] == ["a9", "a10", "b"]
    assert joint.holders["b"] == {Box((0, 0), (2, 3)): (5,), Box((2, 0), (2, 3)): (2,)}
    assert JointTable.from_bytes(joint.to_bytes()) == joint


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (table("a", dtype=StoredDtype.I8), ["a is F32 [4, 3]", "rank 0", "I8 [4, 3]", "rank 1"]),
        (table("b", aliases={"a": "b"}), ["a is tied to b", "rank 1", "rank 0"]),
    ],
)
def test_tables_that_contradict_each_other_are_refused(other: Table, words: list[str]) -> None:
    with refused(CheckpointError, *words):
        join({0: table("a"), 1: other})


def test_a_refusal_reaches_every_rank_and_is_forgotten() -> None:
    def call(channel: StoreChannel) -> None:
        known = KnownTables()
        odd = table("a", dtype=StoredDtype.I8 if channel.rank else StoredDtype.F32)
        for key, mine, values in (("odd", odd, {}), ("values", table("a"), {"/a": channel.rank})):
            with pytest.raises(CheckpointError, match=r"a"):
                agree_on_state(called(channel, key), mine, NestedValues(values), known)
        joint, _ = agree_on_state(called(channel, "good"), table("a"), NestedValues(), known)
        assert [spec.name for spec in joint.specs] == ["a"]

    assert run_ranks(2, call) == [None, None]
