"""Training runs that begin with a checkpoint in a store; a folder stands for the store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from reprise.folder import iteration_name
from reprise.format.mirror_record import MIRROR
from tests.harness import TINY, run_ok

SAVES = "checkpoint.save_interval=2"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a mirrored run of four iterations, beside its store."""
    root = tmp_path_factory.mktemp("origin")
    run_ok(
        root / "run",
        ["model=gpt2_tiny", *TINY, SAVES, "train.train_iters=4", f"checkpoint.mirror=file://{root / 'store'}"],
    )
    return root / "run"


def test_a_run_that_begins_in_a_store_has_no_mirror_unless_named(origin: Path, tmp_path: Path) -> None:
    store = origin.parent / "store"
    before = sorted(store.rglob("*"))
    started = run_ok(tmp_path / "run", [f"checkpoint.load=file://{store}", "train.train_iters=6"])
    assert f"checkpoint.mirror=file://{store} is of the run that is loaded" in started.text
    assert sorted(store.rglob("*")) == before
    assert not (tmp_path / "run" / "checkpoints" / MIRROR).exists()
    again = run_ok(origin, [f"checkpoint.load={origin}", "train.train_iters=4"])  # its own keeps it
    assert "is of the run that is loaded" not in again.text
    saved = json.loads((origin / "checkpoints" / iteration_name(4) / "run_config.json").read_text())
    assert saved["config"]["checkpoint"]["mirror"] == f"file://{store}"


@pytest.mark.parametrize("is_away", [False, True], ids=["gone", "away"])
def test_a_run_goes_on_without_the_store_in_which_it_began(origin: Path, tmp_path: Path, *, is_away: bool) -> None:
    store = tmp_path / "store"
    shutil.copytree(origin.parent / "store", store)
    command = [f"checkpoint.load=file://{store}", "train.train_iters=6", SAVES]
    run_ok(tmp_path / "run", command)
    shutil.rmtree(store)
    if is_away:  # a loop of links is an error of the store, and not an object that is missing
        store.symlink_to(store)
    run_ok(tmp_path / "run", [*command[:1], "train.train_iters=8", SAVES])
    assert (tmp_path / "run" / "checkpoints" / iteration_name(8)).is_dir()


def test_adapters_go_on_from_a_store(origin: Path, tmp_path: Path) -> None:
    base, saved = f"checkpoint.base={origin}", tmp_path / "adapters"
    run_ok(saved, ["model=gpt2_tiny", *TINY, "model.lora.rank=4", base, "train.train_iters=4", SAVES])
    run_ok(tmp_path / "run", [f"checkpoint.load=file://{saved / 'checkpoints'}", base, "train.train_iters=6"])
    assert (tmp_path / "run" / "checkpoints" / iteration_name(6)).is_dir()
