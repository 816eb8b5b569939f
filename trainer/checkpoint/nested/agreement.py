"""How the ranks of a group agree on one table of tensors: by digests, and by the tables themselves only if one is new.

A save costs one message of each rank and one answer as long as no rank's table changes and all give the same values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainer.checkpoint.commit.channel import StoreChannel
from trainer.checkpoint.commit.joint_call import JointCall
from trainer.checkpoint.nested.documents import NestedValues, join_values
from trainer.checkpoint.nested.table import JointTable, Table, digest_of, join

_DIGEST_BYTES = 16
_NONE = bytes(_DIGEST_BYTES)


@dataclass(slots=True)
class KnownTables:
    """The tables of the last agreement of a group, kept from one save to the next.

    Args:
        tables: on the coordinator, by digest.
        digests: on the coordinator, the digest of each rank's table, in the order of the channel's ranks.
        joint: the table of all ranks.
        own: the table of this rank, and its message.
        exchanged: how many tables this rank has sent or, on the coordinator, received.
    """

    tables: dict[bytes, Table] = field(default_factory=dict)
    digests: tuple[bytes, ...] = ()
    joint: JointTable | None = None
    exchanged: int = 0
    own: tuple[Table, bytes] | None = None

    def message_of(self, table: Table) -> bytes:
        """Return this rank's table as a message."""
        if self.own is None or self.own[0] is not table:
            self.own = table, table.to_bytes()
        return self.own[1]


@dataclass(frozen=True, slots=True)
class _Request:
    """The coordinator's answer to the digests: the ranks that send their tables and values, if any."""

    tables: Sequence[int] = ()
    values: Sequence[int] = ()
    is_same_table: bool = True

    def to_json(self) -> str:
        return json.dumps([self.tables, self.values, self.is_same_table])


def agree_on_state(
    call: JointCall, table: Table, values: NestedValues, known: KnownTables
) -> tuple[JointTable, NestedValues]:
    """Return the table and the values of all ranks. A call of all ranks.

    The table is the very object of the last agreement if no rank's has changed. The values are those of all ranks on
    the coordinator, which writes them, and this rank's own on the others.

    Raises:
        CheckpointError: on every rank, if one of them does not make the call, or their tables or values do not fit
            together.
    """
    channel, key, data = call.channel, call.key, known.message_of(table)
    mine, own_values = digest_of(data), values.to_bytes()
    held = _NONE if known.joint is None else known.joint.digest
    rows = call.offer(mine + held + digest_of(own_values))
    request = _decide(channel, rows, known) if channel.coordinates else _Request()
    request = _Request(*json.loads(call.decide(request.to_json())))
    if request.is_same_table and not request.values:
        assert known.joint is not None
        return known.joint, values
    if not channel.coordinates:
        if channel.rank in request.tables:
            channel.put(f"{key}/table/{channel.rank}", data)
            known.exchanged += 1
        if channel.rank in request.values:
            channel.put(f"{key}/values/{channel.rank}", own_values)
    if not request.is_same_table:
        known.joint = None
    with channel.agreed(f"{key}/joined"):
        if channel.coordinates:
            tables = [Table.from_bytes(data) for data in _take(channel, f"{key}/table", request.tables, mine=data)]
            others = [NestedValues.from_bytes(data) for data in _take(channel, f"{key}/values", request.values)]
            known.exchanged += len(tables) - (channel.rank in request.tables)
            if not request.is_same_table:
                _join_tables(channel, dict(zip(request.tables, tables, strict=True)), known)
            values = join_values({channel.rank: values, **dict(zip(request.values, others, strict=True))})
    if not request.is_same_table:
        joint = b"" if known.joint is None else known.joint.to_bytes()
        joint = channel.broadcast(f"{key}/joint", joint)
        known.joint = known.joint or JointTable.from_bytes(joint)
    assert known.joint is not None
    return known.joint, values


def _decide(channel: StoreChannel, rows: Sequence[bytes], known: KnownTables) -> _Request:
    """Return which tables and values the coordinator lacks."""
    digests, held, values = (
        tuple(row[at : at + _DIGEST_BYTES] for row in rows) for at in range(0, 3 * _DIGEST_BYTES, _DIGEST_BYTES)
    )
    is_same = known.joint is not None and digests == known.digests and len({*held}) == 1
    known.digests = digests
    wanted = [] if is_same else _first_of_each(channel, digests, lambda digest: digest not in known.tables)
    return _Request(wanted, _first_of_each(channel, values, lambda digest: digest != values[0]), is_same)


def _first_of_each(channel: StoreChannel, digests: Sequence[bytes], is_wanted: Callable[[bytes], bool]) -> list[int]:
    """Return one rank for each digest that is wanted."""
    first: dict[bytes, int] = {}
    for rank, digest in zip(channel.ranks, digests, strict=True):
        first.setdefault(digest, rank)
    return [rank for digest, rank in first.items() if is_wanted(digest)]


def _take(channel: StoreChannel, key: str, ranks: Sequence[int], *, mine: bytes = b"") -> list[bytes]:
    return [mine if rank == channel.rank else channel.take(f"{key}/{rank}", sender=f"rank {rank}") for rank in ranks]


def _join_tables(channel: StoreChannel, received: dict[int, Table], known: KnownTables) -> None:
    """Make the table of all ranks, and keep theirs for the next time. The coordinator alone."""
    by_rank = dict(zip(channel.ranks, known.digests, strict=True))
    found = {**known.tables, **{by_rank[rank]: table for rank, table in received.items()}}
    known.tables = {digest: found[digest] for digest in known.digests}
    known.joint = join({rank: known.tables[digest] for rank, digest in by_rank.items()})
