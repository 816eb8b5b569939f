"""Saves the weights of a run alone, in a dtype of their own, into a folder beside its checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from reprise.errors import TrainerError
from reprise.format.layout import TensorSpec, build_layout
from reprise.loading.reader import open_checkpoint
from reprise.ranks.channel import StoreChannel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import Retention, SavePolicy, SaveReport
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.folder import WEIGHTS, CheckpointFolder, named_iteration
from reprise.storage.paths import is_symlink
from reprise.tensors.dtypes import stored_dtype
from reprise.tensors.file_aligned import zeros_like_files
from reprise.tensors.live import Contents, LiveTensor
from reprise.tensors.modes import own_modes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightsPolicy:
    """Which iterations have their weights saved, in which dtype, and how many stay.

    Args:
        save_interval: save at every multiple of this iteration count; 0 for none.
        save_steps: save at these iterations too; retention leaves them alone.
        keep: how many of the newest others stay; 0 keeps all.
        saving: folder, file size and timeouts of the run's checkpoints.
    """

    save_interval: int
    save_steps: frozenset[int]
    dtype: torch.dtype
    keep: int
    saving: SavePolicy


class WeightsCheckpointer:
    """The saves of the weights of a run, on a single rank. All ranks make the same calls in the same order.

    The folder `weights` below that of the checkpoints has its own lock, names and retention. So a search for a
    checkpoint to resume from skips it.

    Args:
        nonce: a name of this run of the program, equal on all ranks.
        local_ranks: the ranks on this host, this one among them.
    """

    def __init__(
        self,
        policy: WeightsPolicy,
        channel: StoreChannel,
        *,
        nonce: str,
        local_ranks: Sequence[int] = (),
        files: Files | None = None,
    ) -> None:
        assert policy.saving.folder is not None
        self._folder = CheckpointFolder(policy.saving.folder / WEIGHTS, files or FILE_SYSTEM)
        self._policy, self._channel, self._nonce = policy, channel, f"{nonce}-{WEIGHTS}"
        mirror = policy.saving.retention.mirror
        saving = replace(
            policy.saving,
            folder=self._folder.root,
            save_interval=policy.save_interval,
            save_steps=policy.save_steps,
            retention=Retention(
                policy.keep,
                always=policy.save_steps,
                mirror=None if mirror is None else replace(mirror, prefix=f"{WEIGHTS}/"),
            ),
        )
        self.saver = Checkpointer(saving, channel, nonce=self._nonce, files=self._folder.files, local_ranks=local_ranks)
        self._cast: _Cast | None = None

    def start(self) -> None:
        """Take the lock, sweep the remains of dead attempts, and check that all ranks see the same folder.

        Raises:
            TrainerError: as `Checkpointer.start`.
        """
        self.saver.start()

    def rewind(self, iteration: int) -> None:
        """Rename weights of iterations newer than `iteration`, and take note of the others.

        Those of `iteration` itself are missing if an earlier start was killed between its checkpoint and its weights.
        """
        self.saver.rewind(iteration)

        def is_there() -> bool:
            self._remove_repeats()
            return iteration >= 0 and self._is_there(iteration)

        if self._channel.from_first(f"weights/{self._nonce}/there", is_there):
            self.saver.has_already(iteration, has_optimizer=False)

    def is_due(self, iteration: int) -> bool:
        """Return whether the policy asks for the weights of `iteration`."""
        return self.saver.is_due(iteration)

    def save(self, iteration: int, contents: Contents) -> SaveReport | None:
        """Save `contents`, the weights as they are now, cast on each rank's own shards; see `Checkpointer.save`."""
        if self._policy.dtype is torch.float32:
            return self.saver.save(iteration, contents)
        self.saver.wait()  # it may read the memory that is filled now
        start = time.perf_counter()
        if self._cast is None or self._cast.source is not contents.live:
            self._cast = _Cast.of(contents, self._policy.dtype, self._policy.saving.file_bytes)
        self._cast.fill()
        self.saver.results.blocked_s += time.perf_counter() - start
        cast = replace(contents, specs=self._cast.specs, live=self._cast.live, optimizers=(), is_own=True)
        return self.saver.save(iteration, cast)

    def close(self) -> None:
        """Wait for the running save, and release the lock."""
        self.saver.close()

    def _remove_repeats(self) -> None:
        """Remove superseded weights whose bits an older superseded folder of the iteration has too.

        A run restarted again and again by a launcher before its next checkpoint saves the same weights every time.
        """
        retained: dict[int | None, list[object]] = {}
        for path in sorted(self._folder.superseded(), key=lambda path: (len(path.name), path.name)):
            try:
                tensors = open_checkpoint(path, self._folder.files).manifest.tensors
                older = retained.setdefault(named_iteration(path.name), [])
                leaving = path.with_name(f".{path.name}.{self._nonce}.deleting")
                if tensors not in older or is_symlink(path) or not self._folder.hide(path, leaving):
                    older.append(tensors)
                    continue
                self._folder.files.remove_tree(leaving)
            except TrainerError:  # it cannot be compared
                continue
            except OSError as error:
                _log.error("%s could not be deleted: %s", path, error)

    def _is_there(self, iteration: int) -> bool:
        try:
            open_checkpoint(self._folder.iteration(iteration), self._folder.files)
        except TrainerError:  # missing or damaged: it is saved again
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Cast:
    """A rank's shards in another dtype, in host memory kept from save to save.

    Args:
        source: the original shards.
    """

    source: tuple[LiveTensor, ...]
    specs: tuple[TensorSpec, ...]
    live: tuple[LiveTensor, ...]

    @staticmethod
    @own_modes()
    def of(contents: Contents, dtype: torch.dtype, file_bytes: int) -> _Cast:
        """Return memory for the shards of `contents`, laid out like the files where their rows are contiguous there."""
        specs = {spec.name: replace(spec, dtype=stored_dtype(dtype, where=spec.name)) for spec in contents.specs}
        shapes = [
            replace(
                tensor, spec=specs[tensor.spec.name], local=torch.empty(tensor.box.shape, dtype=dtype, device="cpu")
            )
            for tensor in contents.live
            if not tensor.is_copy
        ]
        layout = build_layout(tuple(specs.values()), file_bytes=file_bytes)
        aligned = zeros_like_files([(tensor, tensor.local) for tensor in shapes], ("",), layout)
        live = tuple(replace(tensor, local=aligned.get(tensor.spec.name, tensor.local)) for tensor in shapes)
        return _Cast(contents.live, tuple(specs.values()), live)

    def fill(self) -> None:
        """Cast the shards as they are now."""
        with torch.no_grad():
            sources = [tensor for tensor in self.source if not tensor.is_copy]
            for source, target in zip(sources, self.live, strict=True):
                target.local.copy_(source.local)
