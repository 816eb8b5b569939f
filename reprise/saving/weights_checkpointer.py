"""Saves the weights of a run alone, in a dtype of their own, into a folder beside its checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from reprise.errors import TrainerError
from reprise.format.layout import TensorSpec, build_layout
from reprise.loading.reader import open_checkpoint
from reprise.ranks.channel import StoreChannel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import SavePolicy, SaveReport
from reprise.storage.files import Files
from reprise.storage.folder import WEIGHTS, named_iteration
from reprise.storage.paths import is_symlink
from reprise.tensors.dtypes import stored_dtype
from reprise.tensors.file_aligned import zeros_like_files
from reprise.tensors.live import Contents, LiveTensor
from reprise.tensors.modes import own_modes

_log = logging.getLogger(__name__)


class WeightsCheckpointer(Checkpointer):
    """The saves of the weights of a run, on a single rank. All ranks make the same calls in the same order.

    Their folder, `weights` below that of the checkpoints, has its own lock, names and retention. So a search for a
    checkpoint to resume from skips it.

    Args:
        nonce: a name of this run of the program, equal on all ranks.
        dtype: of the saved weights.
        local_ranks: the ranks on this host, this one among them.
    """

    def __init__(
        self,
        policy: SavePolicy,
        channel: StoreChannel,
        *,
        nonce: str,
        dtype: torch.dtype,
        local_ranks: Sequence[int] = (),
        files: Files | None = None,
    ) -> None:
        self._nonce, self._dtype = f"{nonce}-{WEIGHTS}", dtype
        super().__init__(policy, channel, nonce=self._nonce, files=files, local_ranks=local_ranks)
        self._folder = self._owned.folder
        self._cast: _Cast | None = None

    def rewind(self, iteration: int, given_up: Collection[int] = ()) -> None:
        """Rename weights of iterations newer than `iteration`, and take note of the others.

        Those of `iteration` itself are missing if an earlier start was killed between its checkpoint and its weights.
        """
        super().rewind(iteration, given_up)

        def is_there() -> bool:
            self._remove_repeats()
            try:
                path, files = self._folder.iteration(iteration), self._folder.files
                return iteration >= 0 and open_checkpoint(path, files).iteration == iteration
            except TrainerError:  # missing or damaged: it is saved again
                return False

        if self._channel.from_first(f"weights/{self._nonce}/there", is_there):
            self.has_already(iteration, has_optimizer=False)

    def save(self, iteration: int, contents: Contents, *, again: bool = False) -> SaveReport | None:
        """Save `contents`, the weights as they are now, cast on each rank's own shards; see `Checkpointer.save`."""
        if self._dtype is torch.float32:
            return super().save(iteration, contents, again=again)
        self.wait()  # it may read the memory that is filled now
        start = time.perf_counter()
        if self._cast is None or self._cast.source is not contents.live:
            self._cast = _Cast.of(contents, self._dtype, self._policy.file_bytes)
        self._cast.fill()
        self.results.blocked_s += time.perf_counter() - start
        cast = replace(contents, specs=self._cast.specs, live=self._cast.live, optimizers=(), is_own=True)
        return super().save(iteration, cast, again=again)

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
