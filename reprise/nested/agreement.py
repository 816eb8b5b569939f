"""The agreement of a group's ranks on a table of tensors: by digests, and by the tables only if a table is new.

A save costs a message of each rank and an answer as long as no rank's table changes and all give the same values. Small
tables and values are part of the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reprise.nested.documents import NestedValues, join_values
from reprise.nested.table import JointTable, Table, digest_of, join
from reprise.ranks.channel import StoreChannel
from reprise.ranks.joint_call import JointCall

_DIGEST_BYTES = 16
_NONE = bytes(_DIGEST_BYTES)
# What is larger travels only if the coordinator asks for it. A table is sent where it is new, values in every save.
SMALL_TABLE_BYTES, SMALL_VALUES_BYTES = 32 << 10, 4 << 10


@dataclass(slots=True)
class KnownTables:
    """The tables of the last agreement of a group, kept from one save to the next.

    Args:
        tables: on the coordinator, by digest.
        digests: on the coordinator, the digest of each rank's table, in the order of the channel's ranks.
        joint: the table of all ranks.
        own: the table of this rank, and its message.
        sent: the digest of this rank's table in the last agreement.
        exchanged: the number of tables sent by this rank or, on the coordinator, received.
    """

    tables: dict[bytes, Table] = field(default_factory=dict)
    digests: tuple[bytes, ...] = ()
    joint: JointTable | None = None
    sent: bytes = b""
    exchanged: int = 0
    own: tuple[Table, bytes] | None = None

    def message_of(self, table: Table) -> bytes:
        """Return this rank's table as a message."""
        if self.own is None or self.own[0] is not table:
            self.own = table, table.to_bytes()
        return self.own[1]


@dataclass(frozen=True, slots=True)
class _Offer:
    """A rank's first message: digests of its table, of its last joint table, and of its values.

    Args:
        table: the table itself, if it is new and small.
        values: the values themselves, if they are small.
    """

    digest: bytes
    held: bytes
    values_digest: bytes
    table: bytes = b""
    values: bytes = b""

    def to_bytes(self) -> bytes:
        size = len(self.table).to_bytes(4, "little")
        return self.digest + self.held + self.values_digest + size + self.table + self.values

    @staticmethod
    def from_bytes(data: bytes) -> _Offer:
        digest, joint_digest, values = (
            data[at : at + _DIGEST_BYTES] for at in range(0, 3 * _DIGEST_BYTES, _DIGEST_BYTES)
        )
        at = 3 * _DIGEST_BYTES + 4
        end = at + int.from_bytes(data[at - 4 : at], "little")
        return _Offer(digest, joint_digest, values, table=data[at:end], values=data[end:])


@dataclass(frozen=True, slots=True)
class _Answer:
    """The coordinator's answer to the offers: the ranks that send their tables and values, if any.

    Args:
        joint: the table of all ranks, if it is new, small and known.
    """

    tables: Sequence[int] = ()
    values: Sequence[int] = ()
    is_same_table: bool = True
    joint: str = ""

    def to_json(self) -> str:
        return json.dumps([self.tables, self.values, self.is_same_table, self.joint])


def agree_on_state(
    call: JointCall,
    table: Table,
    values: NestedValues,
    cache: KnownTables,
    *,
    before_decision: Callable[[], None] = lambda: None,
) -> tuple[JointTable, NestedValues]:
    """Return the table and the values of all ranks. A call of all ranks.

    The table is the very object of the last agreement if no rank's has changed. The values are those of all ranks on
    the coordinator, which writes them, and this rank's own on the others.

    Args:
        before_decision: called on the coordinator once every rank has offered; the call fails if it raises.

    Raises:
        CheckpointError: on every rank, if a rank does not make the call, or their tables or values do not fit together.
    """
    channel, data, own_values = call.channel, cache.message_of(table), values.to_bytes()
    offer = _offer_of(data, own_values, cache, most_bytes=len(data) if channel.coordinates else SMALL_TABLE_BYTES)
    cache.exchanged += bool(offer.table) and not channel.coordinates
    rows = call.offer(offer.to_bytes())
    answer = _Answer()
    if channel.coordinates:
        with call.preparing():
            exchange = _Exchange.of(channel, rows, cache)
            answer = exchange.answer
            if not (answer.tables or answer.values):
                values = exchange.join(values)
                answer = replace(answer, joint=exchange.small_joint)
            before_decision()
    answer = _Answer(*json.loads(call.decide(answer.to_json())))
    if not answer.is_same_table and not channel.coordinates:
        cache.joint = None
    if answer.tables or answer.values:
        if channel.rank in answer.tables:
            channel.put(f"{call.key}/table/{channel.rank}", data)
            cache.exchanged += 1
        if channel.rank in answer.values:
            channel.put(f"{call.key}/values/{channel.rank}", own_values)
        with channel.agreed(f"{call.key}/joined"):
            if channel.coordinates:
                exchange.receive(call.key)
                values = exchange.join(values)
    if not answer.is_same_table:
        joint = answer.joint.encode()
        if not joint:
            joint = channel.broadcast(f"{call.key}/joint", cache.joint.to_bytes() if cache.joint else b"")
        cache.joint = cache.joint or JointTable.from_bytes(joint)
    cache.sent = offer.digest
    assert cache.joint is not None
    return cache.joint, values


def _offer_of(data: bytes, values: bytes, cache: KnownTables, *, most_bytes: int) -> _Offer:
    """Return the offer of a table and values; the table is part of it if it is new and has at most `most_bytes`."""
    digest = digest_of(data)
    is_sent = len(data) <= most_bytes and (cache.joint is None or digest != cache.sent)
    return _Offer(
        digest,
        _NONE if cache.joint is None else cache.joint.digest,
        digest_of(values),
        table=data if is_sent else b"",
        values=values if len(values) <= SMALL_VALUES_BYTES else b"",
    )


@dataclass(slots=True)
class _Exchange:
    """The tables and values of an agreement, on the coordinator."""

    channel: StoreChannel
    offers: dict[int, _Offer]
    known: KnownTables
    answer: _Answer
    tables: dict[int, bytes]
    values: dict[int, bytes]

    @staticmethod
    def of(channel: StoreChannel, rows: Sequence[bytes], cache: KnownTables) -> _Exchange:
        """Return the exchange for the offers of all ranks, with the answer to them."""
        offers = {rank: _Offer.from_bytes(row) for rank, row in zip(channel.ranks, rows, strict=True)}
        offer_of_rank = offers[channel.rank]
        digests = tuple(offer.digest for offer in offers.values())
        is_same = (
            cache.joint is not None and digests == cache.digests and len({offer.held for offer in offers.values()}) == 1
        )
        cache.digests = digests
        new = {} if is_same else _first_of_each({rank: offer.digest for rank, offer in offers.items()})
        tables = {rank: offers[rank].table for digest, rank in new.items() if digest not in cache.tables}
        first_ranks = _first_of_each({rank: offer.values_digest for rank, offer in offers.items()})
        values = {
            rank: offers[rank].values for digest, rank in first_ranks.items() if digest != offer_of_rank.values_digest
        }
        answer = _Answer(
            [rank for rank, data in tables.items() if not data],
            [rank for rank, data in values.items() if not data],
            is_same,
        )
        cache.exchanged += sum(bool(offer.table) for rank, offer in offers.items() if rank != channel.rank)
        return _Exchange(channel, offers, cache, answer, tables, values)

    def receive(self, key: str) -> None:
        """Wait for the tables and the values requested by the answer."""
        for kind, ranks, into in (
            ("table", self.answer.tables, self.tables),
            ("values", self.answer.values, self.values),
        ):
            for rank in ranks:
                into[rank] = self.channel.take(f"{key}/{kind}/{rank}", sender=f"rank {rank}")
        self.known.exchanged += len(self.answer.tables)

    def join(self, values: NestedValues) -> NestedValues:
        """Build the joint table, cache each rank's table, and return the values of all ranks.

        Raises:
            CheckpointError: if they do not fit together.
        """
        cache = self.known
        if self.answer.is_same_table and not self.values:
            return values
        if not self.answer.is_same_table:
            cache.joint = None
            received = {self.offers[rank].digest: Table.from_bytes(data) for rank, data in self.tables.items()}
            tables = {**cache.tables, **received}
            cache.tables = {digest: tables[digest] for digest in cache.digests}
            cache.joint = join({rank: cache.tables[offer.digest] for rank, offer in self.offers.items()})
        received_values = {rank: NestedValues.from_bytes(data) for rank, data in self.values.items()}
        return join_values({self.channel.rank: values, **received_values})

    @property
    def small_joint(self) -> str:
        """Return the table of all ranks, if it is new and small."""
        if self.answer.is_same_table or self.known.joint is None:
            return ""
        data = self.known.joint.to_bytes()
        return data.decode() if len(data) <= SMALL_TABLE_BYTES else ""


def _first_of_each(digests: Mapping[int, bytes]) -> dict[bytes, int]:
    """Return the first rank with each digest."""
    first: dict[bytes, int] = {}
    for rank, digest in digests.items():
        first.setdefault(digest, rank)
    return first
