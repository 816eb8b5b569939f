"""Keeps the plan and the staging memory of the saves for as long as the tensors stay at the same addresses."""

from __future__ import annotations

import logging

from reprise.errors import CheckpointError
from reprise.policy import SavePolicy
from reprise.saving.plan import Plan, make_plan
from reprise.saving.replica_digests import ReplicaDigests
from reprise.saving.snapshot import Snapshot
from reprise.storage.worker import Worker
from reprise.tensors.arena import Arena
from reprise.tensors.live import Contents

_log = logging.getLogger(__name__)


class Staging:
    """The plan and the arena of one rank's saves. Main thread.

    Args:
        worker: touches a new arena.
    """

    def __init__(self, policy: SavePolicy, rank: int, worker: Worker) -> None:
        self._policy, self._rank, self._worker = policy, rank, worker
        self._plan: Plan | None = None
        self.arena = Arena(0, is_pinned=False)
        self._is_settled = False  # the arena, for that plan
        self._is_touched = True

    def plan(self, contents: Contents) -> Plan:
        """Return the plan of a save of `contents`, the last one where they are the very same tensors."""
        if self._plan is None or not self._plan.suits(contents):
            self._plan = make_plan(
                contents,
                rank=self._rank,
                file_bytes=self._policy.file_bytes,
                is_overtaken=self._policy.async_save and not contents.is_own,
                copies_at_call=self._policy.copies_at_call,
            )
            self._is_settled = False
        return self._plan

    def begin(self, plan: Plan, *, with_replicas: bool) -> tuple[Snapshot, ReplicaDigests | None]:
        """Take the state as it is now. No other save may use the arena.

        Args:
            with_replicas: whether to digest the tensors that other ranks hold too.
        """
        self._settle(plan)
        memory = plan.sources.begin()
        snapshot = Snapshot(
            memory,
            plan.order,
            arena=self.arena,
            stall_timeout_s=self._policy.stall_timeout_s,
            copies_first=self._policy.copies_at_call and self._is_touched,
            reads_in_place=not self._policy.copies_at_call,
        )
        if not (with_replicas and plan.shared):
            return snapshot, None
        watched = plan.watched
        return snapshot, ReplicaDigests(plan.shared, plan.pieces, {**memory, **watched.steady}, watched.changing())

    def touch(self) -> None:
        """Have the pages of a new arena there, after the save that was just submitted.

        The disk has most of that save by the time a step needs copies. Before it, the first save of 124M parameters
        began when the pages were there, and was durable after 4.2 to 5.5 s instead of 1.2 s.
        """
        if not self._is_touched:
            self._is_touched = True
            self._worker.submit(self.arena.touch)

    def may_share(self, plan: Plan) -> bool:
        """Return whether there may be a second copy of the columns, beside that of the arena."""
        limit = self._policy.staging_bytes
        return limit is None or sum(piece.hi - piece.lo for piece in plan.columns) + self.arena.total_bytes <= limit

    def close(self) -> None:
        """Free the arena and the plan; no thread may be using them."""
        self.arena.close()
        self._plan = None

    def _settle(self, plan: Plan) -> None:
        """Have an arena that suits a plan; a save that no step can overtake needs none."""
        if self._is_settled:
            return
        self._is_settled = True
        limit = self._policy.staging_bytes
        total_bytes = plan.staging_bytes if limit is None else min(limit, plan.staging_bytes)
        if plan.is_overtaken and total_bytes > self.arena.total_bytes:
            self._replace_arena(total_bytes, is_pinned=plan.sources.can_pin)

    def _replace_arena(self, total_bytes: int, *, is_pinned: bool) -> None:
        """Have a larger arena; where there is no memory for it, steps wait for the disk instead."""
        try:
            larger = Arena(total_bytes, is_pinned=is_pinned)
        except (CheckpointError, OSError) as error:
            _log.error("no staging memory of %d bytes, steps will wait for the disk: %s", total_bytes, error)
            return
        self.arena.close()
        self.arena = larger
        self._is_touched = False
