"""No damage goes unseen, and every refusal names the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from reprise.errors import CheckpointError, MismatchError
from reprise.format.names import FORMAT, STATE
from reprise.loading.choose import LoadSource
from reprise.loading.reader import open_checkpoint, read_places
from reprise.loading.restorer import Restorer
from reprise.ranks.channel import StoreChannel, single_rank_channel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import SavePolicy
from reprise.storage.files import Files
from reprise.storage.json_file import Json
from reprise.tensors.live import Contents
from tests.fakes import FailingFiles, lone_contents, run_ranks
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
    checkpointer = Checkpointer(SavePolicy(folder, file_bytes=12_000), single_rank_channel(), nonce="n")
    checkpointer.start()
    report = checkpointer.save(iteration, contents(iteration, state_format=state_format))
    checkpointer.close()
    assert report is not None
    assert report.error is None
    return report.path


def load(path: Path, iteration: int | None = None) -> tuple[int, Contents]:
    """Load into fresh tensors; return the iteration found and what was filled."""
    target = contents(0)
    for tensor in target.live:
        tensor.local.zero_()
    restorer = Restorer(single_rank_channel(), nonce="n")
    found = restorer.restore(LoadSource(path, iteration), check=lambda _: None, live=lambda _: target.live).checkpoint
    return found.iteration, target


def assert_holds(target: Contents, iteration: int) -> None:
    for found, expected in zip(target.live, contents(iteration).live, strict=True):
        assert torch.equal(found.local, expected.local)


def test_the_rank_that_chooses_a_checkpoint_opens_it_once(tmp_path: Path) -> None:
    path, names = save(tmp_path, 3), list[str]()

    class NotingFiles(Files):
        def open_for_reading(self, path: Path) -> int:
            names.append(path.name)
            return super().open_for_reading(path)

    restorer, target = Restorer(single_rank_channel(), nonce="n", files=NotingFiles()), contents(0)
    restorer.restore(LoadSource(path), check=lambda _: None, live=lambda _: target.live)
    assert_holds(target, 3)
    assert names.count("manifest.json") == names.count(STATE) == 1


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder with iterations 9, 10 and 11."""
    folder = tmp_path_factory.mktemp("saved")
    for iteration in (9, 10, 11):
        save(folder, iteration)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of a run folder with iterations 9, 10 and 11."""
    return shutil.copytree(saved, tmp_path / "run", ignore=shutil.ignore_patterns("lock"))


def test_a_checkpoint_has_exactly_the_files_its_manifest_names(run: Path) -> None:
    folder = run / "iter_0000010"
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == sorted(FILES)
    checkpoint = open_checkpoint(folder, Files())
    assert set(checkpoint.manifest.files) == set(FILES) - {"manifest.json"}
    assert set(read_places(checkpoint)) == {"a", "b", "exp_avg.a"}
    assert checkpoint.has_optimizer


def test_headers_are_read_once_and_the_caller_owns_the_places(run: Path) -> None:
    files = FailingFiles("open_for_reading")
    files.is_armed = False
    checkpoint = open_checkpoint(run / "iter_0000010", files)
    places = read_places(checkpoint)
    files.is_armed = True
    first = dict(places)
    places.clear()
    assert read_places(checkpoint) == first


def test_two_damaged_checkpoints_are_skipped_three_are_an_error(run: Path) -> None:
    flip(run / "iter_0000011" / STATE, 5)
    flip(run / "iter_0000010" / FILES[1], 8000)
    assert load(run)[0] == 9
    with refused(CheckpointError, STATE):
        load(run, 11)  # one that is named is never skipped
    (run / "iter_0000009" / "manifest.json").unlink()
    with refused(CheckpointError, "iter_0000011", "iter_0000010", "iter_0000009"):
        load(run)


def test_a_checkpoint_is_loaded_whole(run: Path) -> None:
    for path, wanted, expected in ((run, None, 11), (run, 9, 9), (run / "iter_0000010", None, 10)):
        iteration, target = load(path, wanted)
        assert iteration == expected
        assert_holds(target, expected)
    with refused(CheckpointError, "9, 10, 11"):
        load(run, 12)


def test_a_missing_or_empty_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "iter_0000001").mkdir(parents=True)
    for path in (tmp_path, tmp_path / "none", tmp_path / "run" / "iter_0000001"):
        with refused(CheckpointError, str(path)):
            load(path)


def test_a_newer_format_is_refused_by_number_and_not_skipped(run: Path) -> None:
    save(run, 12, state_format="reprise/2")
    for path in (run, run / "iter_0000012"):
        with refused(MismatchError, "reprise/2"):
            load(path)


@pytest.mark.parametrize("culprit", [0, 1])
def test_what_one_rank_refuses_every_rank_refuses(run: Path, culprit: int) -> None:
    def call(channel: StoreChannel) -> None:
        def live(checkpoint: object) -> list[object]:
            if channel.rank == culprit:
                raise MismatchError("Another model")
            return []

        restorer = Restorer(channel, nonce="n")
        restorer.restore(LoadSource(run), check=lambda _: None, live=live)  # type: ignore[arg-type]

    outcomes = run_ranks(2, call)
    assert [type(outcome) for outcome in outcomes] == [MismatchError, MismatchError]
    assert all("Another model" in str(outcome) for outcome in outcomes)
