"""Restores the state of a run: rank 0 picks a checkpoint, all ranks open the same one and fill their live tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.commit.channel import StoreChannel
from trainer.checkpoint.format.layout import TensorKind
from trainer.checkpoint.format.names import MANIFEST
from trainer.checkpoint.loading import replicas
from trainer.checkpoint.loading.choose import Chooser, LoadSource
from trainer.checkpoint.loading.loader import LoadReport, fill
from trainer.checkpoint.loading.reader import Checkpoint, read_places
from trainer.checkpoint.loading.same_checkpoint import open_same
from trainer.checkpoint.loading.verify import verify_share
from trainer.checkpoint.storage.files import Files
from trainer.checkpoint.storage.patience import Patience, PatientFiles, await_sight
from trainer.checkpoint.storage.progress_line import ProgressLine
from trainer.checkpoint.tensors.live import LiveTensor
from trainer.errors import LaunchError, TrainerError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint that a run was restored from.

    Args:
        is_verified: whether the digests of all its blocks were checked.
    """

    checkpoint: Checkpoint
    report: LoadReport
    is_verified: bool


class Restorer:
    """The loads of one run, on one rank. All ranks make the same calls in the same order, on the main thread.

    Args:
        nonce: a name of this run of the program, equal on all ranks; messages are named after it.
        patience: how long a read that fails is tried again.
    """

    def __init__(
        self, channel: StoreChannel, *, nonce: str, files: Files | None = None, patience: Patience | None = None
    ) -> None:
        self._channel, self._nonce = channel, nonce
        self._patience = patience or Patience()
        self._files = PatientFiles(files or Files(), self._patience)
        self._messages = 0

    def restore(
        self,
        source: LoadSource,
        *,
        check: Callable[[Checkpoint], None],
        live: Callable[[Checkpoint], Sequence[LiveTensor]],
        verify: bool = True,
        verify_all: bool = False,
    ) -> Restored:
        """Fill live tensors from the newest valid checkpoint of `source`; all ranks load the same one.

        No save may be under way that reads these tensors.

        Args:
            check: refuses a checkpoint of another run before any tensor is read; rank 0 only.
            live: the tensors to fill, given the checkpoint; all ranks.
            verify: check the digests of all blocks that are read.
            verify_all: before that, check those of all blocks of the checkpoint, shared out between the ranks.

        Raises:
            UnreadableError: on every rank, if a rank cannot read the checkpoint now, or does not see it.
            CheckpointError: on every rank, if none can be loaded; damaged ones are logged and skipped, unless named
                exactly.
            MismatchError: on every rank, if one of them finds another checkpoint under the path than rank 0.
        """
        chooser = Chooser(source, self._files, check, patience=self._patience)
        damage: TrainerError | None = None
        while True:
            path, digest = self._pick(chooser, damage)
            problem: TrainerError | None = None
            try:
                if self._channel.rank:
                    await_sight(path / MANIFEST, self._patience, rank=self._channel.rank)
                checkpoint = open_same(path, digest, self._files)
                if verify_all:
                    self._verify(checkpoint)
                tensors = live(checkpoint)
                report = self._fill(checkpoint, tensors, verify=verify)
            except TrainerError as error:
                problem = error
            try:
                self._agree(problem)
                break
            except LaunchError:  # a lost rank says nothing of the checkpoint
                raise
            except TrainerError as error:
                damage = error
        self.check_replicas(tensors)
        is_all_read = not checkpoint.has_optimizer or any(
            tensor.spec.kind is TensorKind.OPTIMIZER for tensor in tensors
        )
        return Restored(checkpoint, report, is_verified=verify_all or (verify and is_all_read))

    def check_replicas(self, live: Sequence[LiveTensor]) -> None:
        """Compare the bits of live tensors that several ranks hold. A call of all ranks.

        Raises:
            CheckpointError: on every rank, a ReplicaError on rank 0, naming the first tensor that differs.
        """
        replicas.check_replicas(live, self._channel, self._key("replicas"))

    def _pick(self, chooser: Chooser, damage: TrainerError | None) -> tuple[Path, str]:
        """Return the next candidate and its digest on every rank.

        Args:
            damage: the first problem that any rank found with the last candidate.
        """
        problem: TrainerError | None = None
        picked = ""
        if self._channel.rank == 0:
            try:
                if damage is not None:
                    chooser.skip(damage)
                path = chooser.pick()
                picked = f"{chooser.digest} {path}"
            except TrainerError as error:
                problem = error
        self._agree(problem)
        digest, _, found = self._channel.broadcast(self._key("pick"), picked.encode()).decode().partition(" ")
        return Path(found), digest

    def _verify(self, checkpoint: Checkpoint) -> None:
        rank, world_size = self._channel.rank, self._channel.world_size
        places = read_places(checkpoint)
        share = sum(place.spec.total_bytes for place in places.values()) // world_size
        line = ProgressLine(f"verifying iteration {checkpoint.iteration}", share)
        checked = verify_share(checkpoint, places, rank=rank, world_size=world_size, progress=line.add)
        _log.info("verified %d bytes of iteration %d on this rank", checked, checkpoint.iteration)

    def _fill(self, checkpoint: Checkpoint, tensors: Sequence[LiveTensor], *, verify: bool) -> LoadReport:
        title = f"loading iteration {checkpoint.iteration}"
        line = ProgressLine(title, sum(tensor.local.nbytes for tensor in tensors))
        return fill(checkpoint, read_places(checkpoint), tensors, verify=verify, progress=lambda done, _: line.at(done))

    def _agree(self, problem: TrainerError | None) -> None:
        self._channel.agree(self._key("agree"), problem)

    def _key(self, kind: str) -> str:
        """Return a key that was not used before."""
        self._messages += 1
        return f"load/{self._nonce}/{self._messages}/{kind}"
