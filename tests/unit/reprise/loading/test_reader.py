"""No damage goes unseen, and every refusal names the file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from reprise.errors import MismatchError
from reprise.format.names import FORMAT, OPTIMIZER_DROPPED, STATE
from reprise.loading.choose import LoadSource
from reprise.loading.reader import open_checkpoint, read_places
from reprise.loading.restorer import Restorer
from reprise.ranks.channel import single_rank_channel
from reprise.storage.files import Files
from reprise.storage.json_file import Json
from reprise.tensors.live import Contents
from tests.fakes import FailingFiles, lone_contents, save_parts
from tests.messages import refused

INDEX = "model.safetensors.index.json"
FILES = (
    "manifest.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    INDEX,
    "optimizer/optimizer-00001-of-00001.safetensors",
    STATE,
)


def contents(iteration: int, *, state_format: str = FORMAT) -> Contents:
    generator = torch.Generator().manual_seed(iteration)
    values = {"a": torch.rand(40, 50, generator=generator), "b": torch.rand(60, 50, generator=generator)}
    moments = {"exp_avg.a": torch.rand(40, 50, generator=generator)}
    document: Json = {"format": state_format, "iteration": iteration}
    return lone_contents(values, {STATE: document}, optimizer=moments)


def save(folder: Path, iteration: int, *, state_format: str = FORMAT) -> Path:
    return save_parts(folder, iteration, lambda _: contents(iteration, state_format=state_format), file_bytes=12_000)


def load(path: Path, iteration: int | None = None, *, files: Files | None = None) -> tuple[int, Contents]:
    """Load into fresh tensors; return the iteration found and what was filled."""
    target = contents(0)
    for tensor in target.live:
        tensor.local.zero_()
    restorer = Restorer(single_rank_channel(), nonce="n", files=files)
    found = restorer.restore(LoadSource(path, iteration), check=lambda _: None, live=lambda _: target.live).checkpoint
    return found.iteration, target


def test_the_rank_that_chooses_a_checkpoint_opens_it_once(tmp_path: Path) -> None:
    path, names = save(tmp_path, 3), list[str]()

    class NotingFiles(Files):
        def open_for_reading(self, path: Path) -> int:
            names.append(path.name)
            return super().open_for_reading(path)

    iteration, target = load(path, files=NotingFiles())
    for tensor, expected in zip(target.live, contents(iteration).live, strict=True):
        assert torch.equal(tensor.local, expected.local)
    assert names.count("manifest.json") == names.count(STATE) == 1


def test_a_checkpoint_has_exactly_the_files_its_manifest_names(tmp_path: Path) -> None:
    folder, files = save(tmp_path, 10), FailingFiles("open_for_reading")
    files.is_armed = False
    checkpoint = open_checkpoint(folder, files)
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == {*FILES}
    assert {*checkpoint.manifest.files, "manifest.json"} == {*FILES}
    places = read_places(checkpoint)
    assert places.keys() == {"a", "b", "exp_avg.a"}
    assert checkpoint.has_optimizer
    files.is_armed = True  # headers are read once
    assert read_places(checkpoint) == places


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_checkpoint_is_known_by_its_own_folders(tmp_path: Path, is_dropped: bool) -> None:
    """Another program's folder may be closed or endless, and the optimizer state may be dropped during the look."""
    folder, names = save(tmp_path, 3), set[str]()
    (folder / "other").mkdir()
    (folder / "other" / "file").touch()

    class ListedFiles(Files):
        def tree(self, path: Path, folders: Collection[str] | None = None) -> dict[str, os.stat_result]:
            statuses = super().tree(path, folders)
            names.update(statuses)
            if is_dropped and not (folder / OPTIMIZER_DROPPED).exists():
                (folder / OPTIMIZER_DROPPED).touch()
                shutil.rmtree(folder / "optimizer")
                return {name: status for name, status in statuses.items() if "/" not in name}
            return statuses

    checkpoint = open_checkpoint(folder, ListedFiles())
    assert names - {OPTIMIZER_DROPPED} == {*FILES}
    assert (checkpoint.is_lightened, checkpoint.has_optimizer) == (is_dropped, not is_dropped)


def test_a_newer_format_is_refused_by_number_and_not_skipped(tmp_path: Path) -> None:
    save(tmp_path, 11)
    save(tmp_path, 12, state_format="reprise/2")
    for path in (tmp_path, tmp_path / "iter_0000012"):
        with refused(MismatchError, "reprise/2"):
            load(path)
