"""Remembers which iteration is saved already, and the attempts whose outcome this rank does not know yet."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from trainer.checkpoint.commit import messages
from trainer.checkpoint.commit.attempt import Attempt, SharedCommitState
from trainer.checkpoint.commit.commit_state import Outcome

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InDoubt:
    """An attempt that this rank stopped waiting for when it could still be committed. It holds none of its bytes."""

    attempt: Attempt
    shared: SharedCommitState
    has_optimizer: bool

    def is_committed(self) -> bool:
        """Return whether it became a checkpoint after all. Main thread."""
        outcome = self.shared.current.outcome
        return outcome is Outcome.COMMITTED or (outcome is not Outcome.FAILED and messages.is_committed(self.attempt))


class SavedIterations:
    """The newest checkpoint that this process has saved or loaded, and what may have become one. Main thread.

    Only the newest is asked about: a run ends with a save of the iteration that it has just saved or loaded. An older
    iteration is saved again, whether retention has deleted it or not.
    """

    def __init__(self) -> None:
        self._newest: tuple[int, bool] | None = None  # the iteration, and whether it holds optimizer state
        self.pinned: set[int] = set()  # loaded by this process: retention leaves them alone
        self.is_loaded_verified = False  # whether all digests of the loaded checkpoint were checked
        self.in_doubt: list[InDoubt] = []  # in the order of the attempts

    def has(self, iteration: int, *, with_optimizer: bool) -> bool:
        """Return whether `iteration` is saved already, with its optimizer state if that is asked for."""
        return self._newest is not None and self._newest[0] == iteration and self._newest[1] >= with_optimizer

    def committed(self, iteration: int, *, has_optimizer: bool) -> None:
        """Take note of a commit. Rank 0 makes one attempt after the other, so all before it are decided."""
        self._newest = iteration, has_optimizer
        self.in_doubt.clear()

    def loaded(self, iteration: int, has_optimizer: bool, *, is_verified: bool, is_pinned: bool = True) -> None:
        """Take note of a checkpoint of this run's folder that was loaded: it is there and, if pinned, it stays."""
        self._newest = iteration, has_optimizer
        if is_pinned:
            self.pinned.add(iteration)
        self.is_loaded_verified = is_verified

    def rewound(self, iteration: int) -> None:
        """Forget checkpoints newer than `iteration`, which were renamed."""
        if self._newest is not None and self._newest[0] > iteration:
            self._newest = None
        self.in_doubt = [found for found in self.in_doubt if found.attempt.iteration <= iteration]

    def settle(self, rank: int) -> None:
        """Find out which attempts in doubt were committed all the same: of several, the last one counts."""
        for number, found in reversed(list(enumerate(self.in_doubt))):
            if found.is_committed():
                _log.info("iteration %d, in doubt on rank %d, was committed", found.attempt.iteration, rank)
                self._newest = found.attempt.iteration, found.has_optimizer
                del self.in_doubt[: number + 1]
                break
        self.in_doubt = [found for found in self.in_doubt if found.shared.current.outcome is not Outcome.FAILED]
