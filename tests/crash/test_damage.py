"""Damage of any kind, anywhere in a checkpoint: found before training goes on, named, and never loaded."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from reprise.errors import CheckpointError
from reprise.format import ACCESSORIES, whole
from reprise.loading import (
    Checkpoint,
    LoadSource,
    Restorer,
    check_tensors,
    open_checkpoint,
    read_places,
)
from reprise.ranks import single_rank_channel
from reprise.storage import Files
from reprise.tensors import LiveTensor
from tests.harness import TINY, compose, run_ok
from tests.profiles import scaled, slow
from trainer.config.optimizer import OptimizerSection
from trainer.run.state import checkpoint_specs

BASE = ["model=gpt2_tiny", *TINY, "train.train_iters=6", "checkpoint.save_interval=2", "checkpoint.file_bytes=50000"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that two ranks wrote, with iterations 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    run_ok(folder, [*BASE, "parallel.zero_stage=3"], ranks=2)
    return folder


def files_of(iteration: Path) -> list[Path]:
    """Return the files that hold state, or say where it is."""
    return sorted(path for path in iteration.rglob("*") if path.is_file() and path.name not in ACCESSORIES)


class Loads:
    """Loads whole checkpoints of the run's model into memory of its own."""

    def __init__(self) -> None:
        specs = list(checkpoint_specs(compose(BASE).model, OptimizerSection()))
        self.live = [LiveTensor(s, whole(s.view), torch.zeros(s.view), (0,)) for s in specs]
        self.specs = specs

    def load(self, path: Path, iteration: int | None = None) -> int:
        """Return the iteration that was loaded."""

        def check(checkpoint: Checkpoint) -> None:
            check_tensors(self.specs, read_places(checkpoint), where=checkpoint.path)

        restorer = Restorer(single_rank_channel(), nonce="n")
        source = LoadSource(path, iteration)
        return restorer.restore(source, check=check, live=lambda _: self.live).checkpoint.iteration


def test_every_flipped_bit_is_found_and_named(run: Path) -> None:
    loads, generator = Loads(), random.Random(20240326)
    newest = run / "checkpoints/iter_0000006"
    files = files_of(newest)
    assert len(files) > 8
    assert loads.load(newest) == 6
    for _ in range(scaled(1000)):
        path = generator.choice(files)
        good = path.read_bytes()
        at, bit = generator.randrange(len(good)), 1 << generator.randrange(8)
        path.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
        with pytest.raises(CheckpointError) as caught:
            loads.load(newest)
        assert str(path) in str(caught.value), (path, at, bit)
        path.write_bytes(good)
    assert loads.load(newest) == 6


def test_a_broken_file_is_found_and_the_older_iteration_loaded(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loads, copy = Loads(), Path(shutil.copytree(run / "checkpoints", tmp_path / "checkpoints"))
    newest = copy / "iter_0000006"
    for path in files_of(newest):
        good, other = path.read_bytes(), copy / "iter_0000004" / path.relative_to(newest)
        for what, data in {"cut": good[:-1], "empty": b"", "missing": None, "swapped": other.read_bytes()}.items():
            if data == good:
                continue  # the same in every iteration, such as the configuration
            path.unlink()
            if data is not None:
                path.write_bytes(data)
            with pytest.raises(CheckpointError, match=r"."):
                loads.load(newest)
            caplog.clear()
            assert loads.load(copy) == 4, (what, path)
            assert any(newest.name in record.message for record in caplog.records if record.levelname == "ERROR")
            path.write_bytes(good)


@pytest.mark.parametrize("name", sorted(ACCESSORIES))
@pytest.mark.parametrize("content", [None, slow(b""), b"{}"])
def test_a_file_that_holds_no_state_is_named_and_costs_nothing(
    run: Path,
    tmp_path: Path,
    name: str,
    content: bytes | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copy = Path(shutil.copytree(run / "checkpoints", tmp_path / "checkpoints"))
    path = copy / "iter_0000006" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert Loads().load(copy) == Loads().load(copy / "iter_0000006") == 6
    (line, _) = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert line.endswith("The file holds no run state, so the checkpoint is loaded without it.")
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(path.parent, Files())
    checkpoint = open_checkpoint(path.parent, Files(), may_lack=True)
    assert list(checkpoint.lacking) == [name]
    assert checkpoint.accessory(name) is None
    assert open_checkpoint(copy / "iter_0000004", Files()).accessory(name) == copy / "iter_0000004" / name
