"""Agrees on the tensor table between a process group's ranks: by digests, and by the tables only if a table is new.

As long as no rank's table changes and all ranks pass the same values, a save takes one message per rank and an answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from reprise.format.manifest import digest_of
from reprise.nested.documents import Section, join_sections
from reprise.nested.table import JointTable, join
from reprise.ranks.joint_call import JointCall


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
    before_decision: Callable[[], None],
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
    channel, joined = call.channel, None
    digests = [digest_of(table), digest_of(values)]
    known = cache.joint.digest if cache.joint and cache.sent == digests[0] else ""
    offers = [json.loads(offer) for offer in call.offer(json.dumps([known, digests]).encode())]
    is_same, is_equal = False, False
    if channel.coordinates:
        with call.preparing():
            is_same = {first for first, _ in offers} == {known} != {""}
            is_equal = all(digest == digests[1] for _, (_, digest) in offers)
            before_decision()
    is_same, is_equal, first_digests = json.loads(call.decide(json.dumps([is_same, is_equal, digests])))
    # The coordinator has its own, and needs no table of the last agreement.
    own_table = "" if is_same or digests[0] == first_digests[0] else table.decode()
    own_values = "" if digests[1] == first_digests[1] else values.decode()
    gather = partial(channel.gather, f"{call.key}/documents", json.dumps([own_table, own_values]).encode())

    def join_all() -> str:
        nonlocal joined
        by_rank = dict(zip(channel.ranks, map(json.loads, gather()), strict=True))
        text = "" if is_same else join({rank: part.encode() or table for rank, (part, _) in by_rank.items()})
        if not is_equal:
            first_ranks = {part: rank for rank, (_, part) in reversed(by_rank.items())}
            joined = join_sections({rank: json.loads(part or values) for part, rank in first_ranks.items()})
        return text

    if not is_same or not is_equal:
        if not channel.coordinates:
            gather()
        text = channel.from_first(f"{call.key}/joint", join_all)
        if not is_same:
            cache.sent, cache.joint = "", JointTable.from_text(text)
    cache.sent = digests[0]
    assert cache.joint is not None
    return cache.joint, joined
