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
    small = {d: data.decode() for d, data in documents.items() if d != cache.sent and len(data) <= SMALL_BYTES}
    offers = list(map(json.loads, call.offer(json.dumps([known, digests, small]).encode())))
    pairs = [(rank, *pair) for rank, (_, pair, _) in zip(channel.ranks, offers, strict=False)]
    requests, is_same = dict[str, int](), False
    if channel.coordinates:
        with call.preparing():
            documents |= {digest: text.encode() for *_, texts in offers for digest, text in texts.items()}
            is_same = {first for first, *_ in offers} == {known} != {""}
            new = [(digest, rank) for rank, *pair in reversed(pairs) for digest in pair[1 if is_same else 0 :]]
            requests = {digest: rank for digest, rank in new if digest not in documents}  # the first rank with each
            if not requests:
                message, joined = _join(pairs, documents, cache, is_same=is_same)
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
                message, joined = _join(pairs, documents, cache, is_same=is_same)
    if not is_same:
        data = message.encode() if channel.coordinates else None
        joint = channel.broadcast(f"{call.key}/joint", data)
        if not channel.coordinates:
            cache.sent, cache.joint = "", JointTable.from_text(joint.decode())
    cache.sent = digests[0]
    assert cache.joint is not None
    return cache.joint, joined


def _join(
    pairs: Sequence[tuple[int, str, str]], documents: Mapping[str, bytes], cache: KnownTables, *, is_same: bool
) -> tuple[str, Section | None]:
    """Return the message with a new joint table, and the joined values if they differ between ranks.

    Args:
        pairs: Each rank with the digests of its table and its values, in channel order.
        documents: The tables and values by digest.
        cache: Receives the table.
        is_same: Whether the ranks' tables are those of the last agreement.

    Raises:
        CheckpointError: The tables or values conflict.
    """
    message = ""
    if not is_same:
        cache.sent = ""
        message = join({rank: documents[digest] for rank, digest, _ in pairs})
        cache.joint = JointTable.from_text(message)
    first_ranks = {digest: rank for rank, _, digest in reversed(pairs)}
    if len(first_ranks) < 2:
        return message, None
    return message, join_sections(
        {rank: json_file.parse(documents[digest], where="a message") for digest, rank in first_ranks.items()}
    )
