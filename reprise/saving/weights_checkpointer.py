"""Saves a run's weights alone, in their own dtype, to a subfolder of its checkpoint folder."""

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
    """Saves a rank's share of a run's weights. All ranks make the same calls in the same order.

    The folder `weights`, inside the checkpoint folder, has its own lock, names and retention, and a resume does not
    search it.

    Args:
        nonce: This launch's random name, equal on all ranks.
        dtype: The saved weights' dtype.
        local_ranks: This host's ranks, including this rank.
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
        """Rename weights newer than `iteration`, and note whether the weights at `iteration` exist.

        They are missing if an earlier launch was killed after saving the checkpoint and before saving the weights.
        """
        super().rewind(iteration, given_up)

        def is_there() -> bool:
            self._remove_repeats()
            try:
                path, files = self._folder.iteration(iteration), self._folder.files
                return iteration >= 0 and open_checkpoint(path, files).iteration == iteration
            except TrainerError:  # missing or damaged: they are saved again
                return False

        if self._channel.from_first(f"weights/{self._nonce}/there", is_there):
            self.note_saved(iteration, has_optimizer=False)

    def save(self, iteration: int, contents: Contents, *, again: bool = False) -> SaveReport | None:
        """Save the current weights, with each rank casting its own shards; see `Checkpointer.save`."""
        if self._dtype is torch.float32:
            return super().save(iteration, contents, again=again)
        self.wait()  # the previous save may still read the memory filled below
        start = time.perf_counter()
        if self._cast is None or self._cast.source is not contents.live:
            self._cast = _Cast.of(contents, self._dtype, self._policy.file_bytes)
        self._cast.fill()
        self.results.blocked_s += time.perf_counter() - start
        cast = replace(contents, specs=self._cast.specs, live=self._cast.live, optimizers=(), is_own=True)
        return super().save(iteration, cast, again=again)

    def _remove_repeats(self) -> None:
        """Remove superseded weights equal to those in an older superseded folder for the same iteration.

        A run restarted repeatedly before its next checkpoint saves the same weights every time.
        """
        retained: dict[int | None, list[object]] = {}
        for path in sorted(self._folder.superseded(), key=lambda path: (len(path.name), path.name)):
            try:
                tensors = open_checkpoint(path, self._folder.files).manifest.tensors
                older = retained.setdefault(named_iteration(path.name), [])
                if tensors not in older or is_symlink(path) or not self._folder.delete(path, self._nonce):
                    older.append(tensors)
            except TrainerError:  # not comparable
                continue
            except OSError as error:
                _log.error("%s could not be deleted: %s", path, error)


@dataclass(frozen=True, slots=True)
class _Cast:
    """A rank's shards in another dtype, in host memory reused between saves.

    Args:
        source: The original shards.
    """

    source: tuple[LiveTensor, ...]
    specs: tuple[TensorSpec, ...]
    live: tuple[LiveTensor, ...]

    @staticmethod
    @own_modes()
    def of(contents: Contents, dtype: torch.dtype, file_bytes: int) -> _Cast:
        """Allocate memory for casting `contents`, laid out as in the files where rows are contiguous there."""
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
        """Cast the shards' current values."""
        with torch.no_grad():
            sources = [tensor for tensor in self.source if not tensor.is_copy]
            for source, target in zip(sources, self.live, strict=True):
                target.local.copy_(source.local)
