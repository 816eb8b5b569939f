"""The agreement of a group's ranks on a table of tensors: by digests, and by the tables only if a table is new.

A save costs a message of each rank and an answer as long as no rank's table changes and all give the same values. Small
tables and values are part of the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reprise.nested.documents import Section, join_sections
from reprise.nested.table import JointTable, digest_of, join
from reprise.ranks.channel import StoreChannel
from reprise.ranks.joint_call import JointCall
from reprise.storage import json_file

# What is larger travels only if the coordinator asks for it. A table is sent where it is new, values in every save.
SMALL_TABLE_BYTES, SMALL_VALUES_BYTES = 32 << 10, 4 << 10
_TABLE, _VALUES = "table", "values"


@dataclass(slots=True)
class KnownTables:
    """The tables of the last agreement of a group, kept from one save to the next.

    Args:
        joint: the table of all ranks.
        sent: the digest of this rank's table in the last agreement.
        tables: on the coordinator, by digest.
        digests: on the coordinator, the digest of each rank's table, in the order of the channel's ranks.
    """

    joint: JointTable | None = None
    sent: str = ""
    tables: dict[str, bytes] = field(default_factory=dict)
    digests: tuple[str, ...] = ()


def agree_on_state(
    call: JointCall,
    table: bytes,
    values: bytes,
    cache: KnownTables,
    *,
    before_decision: Callable[[], None] = lambda: None,
) -> tuple[JointTable, Section | None]:
    """Return the table and the values of all ranks. A call of all ranks.

    The table is the very object of the last agreement if no rank's has changed. The values are those of all ranks on
    the coordinator, which writes them; None if they are this rank's, and on the others.

    Args:
        table: see `table_of`.
        values: a `Section` as JSON.
        before_decision: called on the coordinator once every rank has offered; the call fails if it raises.

    Raises:
        CheckpointError: on every rank, if a rank does not make the call, or their tables or values do not fit together.
    """
    channel, documents, joined = call.channel, {_TABLE: table, _VALUES: values}, None
    digests = {kind: digest_of(data) for kind, data in documents.items()}
    most_bytes = {_TABLE: SMALL_TABLE_BYTES if digests[_TABLE] != cache.sent else -1, _VALUES: SMALL_VALUES_BYTES}
    small = {digests[kind]: data.decode() for kind, data in documents.items() if len(data) <= most_bytes[kind]}
    rows = call.offer(json.dumps([cache.joint.digest if cache.joint else "", digests, small]).encode())
    answer: list[Any] = []
    if channel.coordinates:
        with call.preparing():
            exchange = _Exchange(channel, rows, cache)
            exchange.documents |= {digests[kind]: data for kind, data in documents.items()}
            requests = {kind: exchange.lacking(kind) for kind in documents}
            answer = [requests, exchange.is_same, ""]
            if not any(requests.values()):
                joined = exchange.join()
                answer[2] = exchange.joint if len(exchange.joint) <= SMALL_TABLE_BYTES else ""
            before_decision()
    requests, is_same, joint = json.loads(call.decide(json.dumps(answer)))
    if any(requests.values()):
        for kind in documents:
            if channel.rank in requests[kind]:
                channel.put(f"{call.key}/{kind}/{channel.rank}", documents[kind])
        with channel.agreed(f"{call.key}/joined"):
            if channel.coordinates:
                exchange.receive(call.key, requests)
                joined = exchange.join()
    if not is_same:
        if not joint:
            data = exchange.joint.encode() if channel.coordinates else None
            joint = channel.broadcast(f"{call.key}/joint", data).decode()
        if not channel.coordinates:
            cache.joint = JointTable.from_text(joint)
    cache.sent = digests[_TABLE]
    assert cache.joint is not None
    return cache.joint, joined


class _Exchange:
    """The tables and values of an agreement, on the coordinator.

    Attributes:
        documents: what has come, by digest, and the tables of the last agreement.
        is_same: whether every rank gives its table of the last agreement, and has the joint table.
        joint: the message with a new joint table.
    """

    def __init__(self, channel: StoreChannel, rows: list[bytes], cache: KnownTables) -> None:
        self._channel, self._cache = channel, cache
        offers = [json.loads(row) for row in rows]
        self._digests = {rank: digests for rank, (_, digests, _) in zip(channel.ranks, offers, strict=True)}
        self.documents = {digest: text.encode() for *_, small in offers for digest, text in small.items()}
        self.documents |= cache.tables
        joint_digests = {digest for digest, *_ in offers}
        is_known = cache.joint is not None and joint_digests == {cache.joint.digest}
        self.is_same, self.joint = is_known and cache.digests == self._tables(), ""

    def _tables(self) -> tuple[str, ...]:
        return tuple(digests[_TABLE] for digests in self._digests.values())

    def lacking(self, kind: str) -> list[int]:
        """Return the first rank with each table, or values, that has not come."""
        return sorted(rank for digest, rank in self._first_with(kind).items() if digest not in self.documents)

    def _first_with(self, kind: str) -> dict[str, int]:
        """Return by digest the first rank with each table, or values; the coordinator comes before all others."""
        return {digests[kind]: rank for rank, digests in reversed(self._digests.items())}

    def receive(self, key: str, requests: dict[str, list[int]]) -> None:
        """Wait for what the ranks were asked for."""
        for kind, ranks in requests.items():
            for rank in ranks:
                data = self._channel.take(f"{key}/{kind}/{rank}", sender=f"rank {rank}")
                self.documents[self._digests[rank][kind]] = data

    def join(self) -> Section | None:
        """Build the joint table, cache each rank's table, and return the values of all ranks, where they differ.

        Raises:
            CheckpointError: if they do not fit together.
        """
        cache = self._cache
        if not self.is_same:
            cache.joint, cache.digests = None, self._tables()
            cache.tables = {digest: self.documents[digest] for digest in cache.digests}
            self.joint = join({rank: cache.tables[digests[_TABLE]] for rank, digests in self._digests.items()})
            cache.joint = JointTable.from_text(self.joint)
        ranks = self._first_with(_VALUES)
        if len(ranks) < 2:
            return None
        return join_sections(
            {rank: json_file.parse(self.documents[digest], where="a message") for digest, rank in ranks.items()}
        )
