"""Agrees on the tensor table between a process group's ranks: by digests, and by the tables only if a table is new.

As long as no rank's table changes and all ranks pass the same values, a save takes one message per rank and an answer.
Small tables and values travel inside the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reprise.format.manifest import digest_of
from reprise.nested.documents import Section, join_sections
from reprise.nested.table import JointTable, join
from reprise.ranks.joint_call import JointCall
from reprise.storage import json_file

# Larger tables and values are sent only on the coordinator's request.
SMALL_BYTES = 4 << 10


@dataclass(slots=True)
class KnownTables:
    """A process group's tables from the last agreement, kept between saves.

    Args:
        joint: The table for all ranks.
        sent: The digest of this rank's table in `joint`. Empty if this is open, as after an error.
    """

    joint: JointTable | None = None
    sent: str = ""


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
    channel, joined, message = call.channel, None, ""
    digests = (digest_of(table), digest_of(values))
    known = cache.joint.digest if cache.joint and cache.sent == digests[0] else ""
    documents = dict(zip(digests, (table, values), strict=True))
    new = [digest for digest in digests if digest != cache.sent]
    small = {digest: documents[digest].decode() for digest in new if len(documents[digest]) <= SMALL_BYTES}
    offers = list(map(json.loads, call.offer(json.dumps([known, digests, small]).encode())))
    tables, sections = (
        [(pair[place], rank) for (_, pair, _), rank in zip(offers, channel.ranks, strict=False)] for place in (0, 1)
    )
    requests, is_same = dict[str, int](), False
    if channel.coordinates:
        with call.preparing():
            documents |= {digest: text.encode() for *_, texts in offers for digest, text in texts.items()}
            is_same = {first for first, *_ in offers} == {known} != {""}
            senders = dict(reversed([*(() if is_same else tables), *sections]))  # the first rank with each document
            requests = {digest: rank for digest, rank in senders.items() if digest not in documents}
            if not requests:
                message, joined = _join(tables, sections, documents, cache, is_same=is_same)
            before_decision()
    requests, is_same = json.loads(call.decide(json.dumps([requests, is_same])))
    if requests:
        for digest in digests:
            if requests.get(digest) == channel.rank:
                channel.put(f"{call.key}/{digest}", documents[digest])
        with channel.agreed(f"{call.key}/joined"):
            if channel.coordinates:
                for digest, rank in requests.items():
                    documents[digest] = channel.take(f"{call.key}/{digest}", sender=f"rank {rank}")
                message, joined = _join(tables, sections, documents, cache, is_same=is_same)
    if not is_same:
        data = message.encode() if channel.coordinates else None
        joint = channel.broadcast(f"{call.key}/joint", data)
        if not channel.coordinates:
            cache.sent, cache.joint = "", JointTable.from_text(joint.decode())
    cache.sent = digests[0]
    assert cache.joint is not None
    return cache.joint, joined


def _join(
    tables: Sequence[tuple[str, int]],
    sections: Sequence[tuple[str, int]],
    documents: Mapping[str, bytes],
    cache: KnownTables,
    *,
    is_same: bool,
) -> tuple[str, Section | None]:
    """Return the message with a new joint table, and the joined values if they differ between ranks.

    Args:
        tables: The digest of each rank's table, with the rank, in channel order.
        sections: The digest of each rank's values, likewise.
        documents: The tables and values by digest.
        cache: Receives the tables.
        is_same: Whether the ranks' tables are those of the last agreement.

    Raises:
        CheckpointError: The tables or values conflict.
    """
    message = ""
    if not is_same:
        cache.sent = ""
        message = join({rank: documents[digest] for digest, rank in tables})
        cache.joint = JointTable.from_text(message)
    first_ranks = dict(reversed(sections))
    if len(first_ranks) < 2:
        return message, None
    values = {rank: json_file.parse(documents[d], where="a message") for d, rank in first_ranks.items()}
    return message, join_sections(values)
