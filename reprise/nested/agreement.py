"""Agrees on the tensor table between a process group's ranks: by digests, and by the tables only if a table is new.

As long as no rank's table changes and all ranks pass the same values, a save takes one message per rank and an answer.
Small tables and values travel inside the message.
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

# Larger tables and values are sent only on the coordinator's request. A table is sent if it is new, values in every
# save.
SMALL_TABLE_BYTES, SMALL_VALUES_BYTES = 32 << 10, 4 << 10
_TABLE, _VALUES = "table", "values"


@dataclass(slots=True)
class KnownTables:
    """A process group's tables from the last agreement, kept between saves.

    Args:
        joint: The table for all ranks.
        sent: The digest of this rank's table in the last agreement.
        tables: On the coordinator, the tables by digest.
        digests: On the coordinator, the digest of each rank's table, in channel order.
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
    """Return the joint table and the joined values for all ranks. Collective.

    The table is the same object as in the last agreement if no rank's table has changed. The values are returned on the
    coordinator, which writes them. They are None on other ranks, and if all ranks pass the same values.

    Args:
        table: See `table_of`.
        values: A `Section` as JSON.
        before_decision: Called on the coordinator once every rank has sent its offer. The call fails if it raises.

    Raises:
        CheckpointError: A rank does not make the call, or the tables or values conflict. Every rank raises.
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
    """The coordinator's side: the tables and values in an agreement.

    Attributes:
        documents: By digest, the received tables and values, and the tables from the last agreement.
        is_same: Whether every rank has the joint table and passes the same table as in the last agreement.
        joint: The message with a new joint table.
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
        """Return, for each table (or values document) not received yet, the first rank with it."""
        return sorted(rank for digest, rank in self._first_with(kind).items() if digest not in self.documents)

    def _first_with(self, kind: str) -> dict[str, int]:
        """Return by digest the first rank with each table or values document. The coordinator precedes all others."""
        return {digests[kind]: rank for rank, digests in reversed(self._digests.items())}

    def receive(self, key: str, requests: dict[str, list[int]]) -> None:
        """Wait for the requested documents."""
        for kind, ranks in requests.items():
            for rank in ranks:
                data = self._channel.take(f"{key}/{kind}/{rank}", sender=f"rank {rank}")
                self.documents[self._digests[rank][kind]] = data

    def join(self) -> Section | None:
        """Build the joint table, cache each rank's table, and return the joined values if they differ between ranks.

        Raises:
            CheckpointError: The tables or values conflict.
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
