"""Saves in the background for your own training loop. Every save holds the tensors as they were at the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from reprise.errors import CheckpointError, TrainerError
from reprise.format.layout import DEFAULT_FILE_BYTES
from reprise.nested.agreement import KnownTables
from reprise.nested.calls import MakeTree, contents_of
from reprise.nested.held import HeldTensors
from reprise.nested.save_arguments import check_options, check_vacant, target_folder
from reprise.nested.tree import Tree, tree_of, tree_of_dict
from reprise.ranks.group import CALL_TIMEOUT_S, COMMIT_TIMEOUT_S, open_call
from reprise.ranks.joint_call import JointCall, end_waits
from reprise.saving import program_end
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import Retention, SavePolicy
from reprise.storage.files import Files
from reprise.tensors.live import Contents


class AsyncSaver:
    """Saves to a folder in the background. All ranks in the group make the same calls in the same order.

    A save copies all tensors and values, and returns while the copies are being written, so later changes do not reach
    the checkpoint. If a save fails, the next call to `save`, `save_state_dict`, `wait` or `close` raises its error,
    once. Committed checkpoints are untouched. Saving an iteration again keeps the first folder as superseded, unless
    `overwrite` is False.

    A program ending without `close` waits for the running save, and exits with status 1 if it fails. After an error it
    waits 20 seconds.

        with AsyncSaver("checkpoints", max_checkpoint_keep=2) as saver:
            for iteration in range(1, 1001):
                train(model, optimizer)
                if iteration % 100 == 0:
                    saver.save(iteration, model, optimizer)

    Args:
        folder: The checkpoint folder, on a mounted file system. Saves add `iter_<iteration>` to it.
        max_checkpoint_keep: How many newest checkpoints to keep in `folder`. 0 keeps all.
        file_bytes: The largest tensor file in bytes. A larger tensor gets its own file.
        staging_bytes: The largest memory for copies, in bytes, which stays allocated until `close`. None allows as much
            as this rank writes. With less, a save returns only once the remainder is written.
        stall_timeout_s: Seconds for which such a save waits on a stalled disk before it fails.
        commit_timeout_s: Seconds after which an unfinished save fails.
        process_group: The saving ranks. None saves with all ranks.
        coordinator_rank: The global rank to lock the folder, decide and rename.
        from_rank0: Shell patterns for tensors with different values on different ranks by design. See `save`.
        overwrite: Whether an existing iteration may be saved again. See `save`.
        timeout_s: Seconds for which a call waits for other ranks to make it.

    Raises:
        ConfigError: On this rank, `folder` is a URL, or a number or pattern is invalid. Other ranks raise
            CheckpointError.
        LockError: Another job writes to the folder. Every rank raises.
        TrainerError: A rank does not see the coordinator's folder. Every rank raises.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_checkpoint_keep: int = 0,
        file_bytes: int = DEFAULT_FILE_BYTES,
        staging_bytes: int | None = None,
        stall_timeout_s: float = 5.0,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        process_group: dist.ProcessGroup | None = None,
        coordinator_rank: int = 0,
        from_rank0: Sequence[str] = (),
        overwrite: bool = True,
        timeout_s: float = CALL_TIMEOUT_S,
        files: Files | None = None,
    ) -> None:
        checkpointer: Checkpointer | None = None
        try:
            with open_call(
                "AsyncSaver()", timeout_s=timeout_s, process_group=process_group, coordinator_rank=coordinator_rank
            ) as call:
                self._channel, self._timeout_s = call.channel.clone(), timeout_s
                self._calls, self._is_closed = 0, False
                self._held = HeldTensors(KnownTables())
                with call.agreed():
                    self._folder = target_folder(folder)
                    policy = SavePolicy(
                        self._folder,
                        retention=Retention(max_checkpoint_keep),
                        file_bytes=file_bytes,
                        commit_timeout_s=commit_timeout_s,
                        async_save=True,
                        copies_at_call=True,
                        staging_bytes=staging_bytes,
                        stall_timeout_s=stall_timeout_s,
                    )
                    check_options(policy, from_rank0)
                    self._from_rank0, self._overwrite = tuple(from_rank0), overwrite
                    checkpointer = Checkpointer(policy, self._channel, nonce=call.nonce, files=files)
                self._checkpointer = checkpointer
                checkpointer.start()
        except BaseException:
            if checkpointer is not None:
                checkpointer.close()
            raise

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        state: Mapping[str, object] | None = None,
    ) -> None:
        """Allocate the staging memory in the background, so that the first save need not wait for it.

        Optional. Call it after the first optimizer step, which creates most optimizer state. The call itself waits for
        a running save and, with tensors on a CUDA device, until the memory is pinned. A save with larger or different
        tensors allocates what it needs.

        Raises:
            TrainerError: A tensor or value cannot be saved. Every rank raises.
        """
        self._call(None, lambda: tree_of(model, optimizer, state))

    def save(
        self,
        iteration: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        state: Mapping[str, object] | None = None,
        per_rank: Mapping[str, object] | None = None,
        rng: bool = False,
        files: Mapping[str, object] | None = None,
    ) -> None:
        """Save a model and its optimizer in the background, after waiting for the previous save; see `reprise.save`.

        Raises:
            TrainerError: The previous save failed, or a tensor or value cannot be saved. Every rank raises.
        """
        rank = self._channel.rank
        self._call(
            iteration,
            lambda: tree_of(model, optimizer, state, rank=rank, per_rank=per_rank, rng=rng, files=files),
        )

    def save_state_dict(
        self,
        iteration: int,
        state_dict: dict[str, Any],
        *,
        model: nn.Module | None = None,
        files: Mapping[str, object] | None = None,
    ) -> None:
        """Save a nested state dict in the background, after waiting for the previous save.

        See `reprise.save_state_dict` for the arguments.

        Raises:
            TrainerError: The previous save failed, or a tensor or value cannot be saved. Every rank raises.
        """
        self._call(iteration, lambda: tree_of_dict(state_dict, model=model, files=files))

    @property
    def is_saving(self) -> bool:
        """Return whether a save is running."""
        return self._checkpointer.is_saving

    def wait(self) -> None:
        """Wait until the running save is a checkpoint.

        Raises:
            TrainerError: The save failed.
        """
        self._checkpointer.wait()
        program_end.forget(self)
        for report in self._checkpointer.reports():
            if report.error is not None:
                raise report.error

    def close(self) -> None:
        """Wait for the running save, and release the folder.

        After an interrupt, such as Ctrl-C, the save gets 20 more seconds. A log line reports an unfinished save.

        Raises:
            TrainerError: The save failed.
        """
        try:
            self._is_closed = True
            self._checkpointer.close()
            self._held = HeldTensors(KnownTables())
            self.wait()
        finally:
            self._abandon()

    def __enter__(self) -> AsyncSaver:
        """Return the saver."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the saver. After an error, wait only a short time for a running save."""
        try:
            if error is None or (isinstance(error, SystemExit) and not error.code):
                self.close()
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Release the folder, after waiting a short time for a running save."""
        self._is_closed = True
        program_end.forget(self)
        self._checkpointer.abandon()

    def _call(self, iteration: int | None, make_tree: MakeTree) -> None:
        """Save a tree once all ranks agree on it. Without an iteration, allocate the memory for it."""
        name = "AsyncSaver.prepare()" if iteration is None else f"AsyncSaver.save(iteration={iteration})"
        checkpointer, attempts = self._checkpointer, self._checkpointer.attempts
        call = JointCall(self._channel, f"contents/{self._calls + 1}", name, timeout_s=self._timeout_s)

        def make() -> Tree:
            self._require_open()
            return make_tree()

        def require_vacant() -> None:
            if iteration is not None and not self._overwrite:
                check_vacant(self._folder, iteration)

        try:
            self._calls += 1
            call.announce()
            contents = contents_of(
                call,
                make,
                holdings=self._held,
                iteration=iteration or 0,
                from_rank0=self._from_rank0,
                before_decision=require_vacant,
            )
            if iteration is None:
                checkpointer.prepare(contents)
                return
            self._start(iteration, contents)
        except BaseException as error:
            is_alone = call.is_out_of_step and not isinstance(error, TrainerError)
            if is_alone and checkpointer.attempts == attempts:  # otherwise the aborted attempt tells all ranks
                self._is_closed = True
                end_waits(self._channel, error)
            raise

    def _start(self, iteration: int, contents: Contents) -> None:
        """Start a save. A method, because an interrupt in a nested `try` line passes by the outer handlers."""
        try:
            self._checkpointer.save(iteration, contents)
        finally:  # after the save, since the program may be exiting already
            program_end.finish_at_end(self, self._checkpointer.job)

    def _require_open(self) -> None:
        """Raise if the saver is closed or the previous save failed."""
        if self._is_closed:
            raise CheckpointError("The saver is closed", where=self._folder, fix="Create a new one.")
        self.wait()
