"""A training run with a mirror: what is in the store at its end, after a kill, while it is away, and for the next run.

A folder stands for the store.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from reprise.errors import ConfigError
from reprise.format.mirror_record import MIRROR
from reprise.storage import iteration_name
from reprise.stores import mirror_run
from tests.crash.outcomes import saved
from tests.harness import TINY, checkpoint, launch, run_ok, tensor_files
from tests.messages import refused
from tests.profiles import slow
from tests.stores.saving import assert_whole, committed, content

SAVES = "checkpoint.save_interval=2"
BASE = (*TINY, SAVES, "train.train_iters=6", "schedule.lr_decay_iters=6")
NAMES = [*map(iteration_name, (2, 4, 6)), "weights/iter_0000004"]


def settings(store: Path, *more: str) -> list[str]:
    return [*BASE, "checkpoint.save_weights_interval=4", f"checkpoint.mirror=file://{store}", *more]


def test_a_run_is_in_the_store_at_its_end(tmp_path: Path) -> None:
    run, store, newest = tmp_path / "run", tmp_path / "store", iteration_name(6)
    ended = run_ok(run, settings(store, "checkpoint.max_checkpoint_keep=1"))
    assert sorted(json.loads((run / "checkpoints" / MIRROR).read_text())["committed"]) == NAMES == committed(store)
    assert content(store / newest) == content(checkpoint(run, 6))
    assert "not in file://" not in ended.text
    config = json.loads((store / newest / "run_config.json").read_text())["config"]
    assert config["checkpoint"]["mirror"] == f"file://{store}"


@pytest.mark.slow
def test_a_killed_run_catches_up(tmp_path: Path) -> None:
    run, store = tmp_path / "run", tmp_path / "store"
    launch(run, settings(store), ranks=2, kill_after=5, saved=4)
    run_ok(run, settings(store), ranks=2)
    assert assert_whole(store, run / "checkpoints") == NAMES


@pytest.mark.slow
def test_a_store_that_is_away_ends_no_run_and_is_named(tmp_path: Path) -> None:
    run, store, wait = tmp_path / "run", tmp_path / "file", "checkpoint.mirror_wait_s=1"
    store.write_text("no folder")
    command = settings(store, "checkpoint.max_checkpoint_keep=1")
    ended = run_ok(run, [*command, wait])
    assert f"not in file://{store} yet: iteration 2, 4, 6, weights/4. " in ended.text
    assert sorted(path.name for path in (run / "checkpoints").glob("iter_*")) == NAMES[:3]
    store.unlink()
    run_ok(run, command)  # nothing to train, all to upload
    assert assert_whole(store, run / "checkpoints") == NAMES


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("checkpoint.mirror=/a/folder", "checkpoint.mirror=/a/folder: "),
        slow("checkpoint.mirror=s3://b/run checkpoint.save=null checkpoint.local.dir=/d", "needs checkpoint.save,"),
        slow("checkpoint.mirror=s3://key:secret@b/run", "without a user, a query"),
        slow("checkpoint.mirror_interval=0", "checkpoint.mirror_interval=0: "),
    ],
)
def test_a_mirror_that_cannot_be_is_refused(tmp_path: Path, words: str, problem: str) -> None:
    ended = launch(tmp_path / "run", [*TINY, *words.split()])
    assert not ended.ok
    assert problem in ended.text
    assert "secret" not in ended.text.replace("AWS_SECRET", "")


def test_a_mirror_in_the_folder_of_the_run_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, str(tmp_path)):
        mirror_run(tmp_path, f"file://{tmp_path / 'checkpoints' / 'weights'}", keep=0, interval=0, once=True)


@pytest.mark.slow
def test_a_lost_folder_is_no_fresh_start_beside_its_mirror(tmp_path: Path) -> None:
    run, store, whole = tmp_path / "run", tmp_path / "store", tmp_path / "whole"
    from_store = f"checkpoint.load=file://{store}"
    run_ok(run, settings(store, "train.train_iters=4"))
    run_ok(whole, settings(tmp_path / "other"))
    shutil.move(run / "checkpoints", tmp_path / "aside")  # a disk of its own that is gone
    assert from_store in launch(run, settings(store)).text
    shutil.rmtree(run)
    starts = ("auto", from_store), ("none", "checkpoint.mirror"), (f"file://{store}", "its own URL")
    for load, fix in starts:
        ended = launch(run, settings(store, f"checkpoint.load={load}"))
        assert not ended.ok
        assert "iteration 4 in the mirror" in ended.text
        assert fix in ended.text
    for _ in range(2):  # the same command goes on from its own
        run_ok(run, settings(tmp_path / "second", from_store))
    assert committed(store) == NAMES[:2] + NAMES[3:]
    assert committed(tmp_path / "second") == NAMES[2:]
    assert tensor_files(tmp_path / "second" / NAMES[2]) == tensor_files(checkpoint(whole, 6))


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a mirrored run of four iterations, beside its store."""
    root = tmp_path_factory.mktemp("origin")
    run_ok(root / "run", [*BASE, "train.train_iters=4", f"checkpoint.mirror=file://{root / 'store'}"])
    return root / "run"


@pytest.mark.slow
def test_a_run_that_begins_in_a_store_has_no_mirror_unless_named(origin: Path, tmp_path: Path) -> None:
    store = origin.parent / "store"
    before = sorted(store.rglob("*"))
    started = run_ok(tmp_path / "run", [f"checkpoint.load=file://{store}", "train.train_iters=6"])
    assert f"checkpoint.mirror=file://{store} belongs to the loaded run" in started.text
    assert sorted(store.rglob("*")) == before
    assert not (tmp_path / "run" / "checkpoints" / MIRROR).exists()
    again = run_ok(origin, [f"checkpoint.load={origin}", "train.train_iters=4"])  # its own keeps it
    assert "belongs to the loaded run" not in again.text


@pytest.mark.slow
@pytest.mark.parametrize("is_away", [False, True], ids=["gone", "away"])
def test_a_run_goes_on_without_the_store_in_which_it_began(origin: Path, tmp_path: Path, *, is_away: bool) -> None:
    store = Path(shutil.copytree(origin.parent / "store", tmp_path / "store"))
    command = [f"checkpoint.load=file://{store}", SAVES]
    run_ok(tmp_path / "run", [*command, "train.train_iters=6"])
    shutil.rmtree(store)
    if is_away:  # a loop of links is an error of the store, and not an object that is missing
        store.symlink_to(store)
    run_ok(tmp_path / "run", [*command, "train.train_iters=8"])
    assert saved(tmp_path / "run")[-1] == 8


@pytest.mark.slow
def test_adapters_go_on_from_a_store(origin: Path, tmp_path: Path) -> None:
    base, adapters = f"checkpoint.base={origin}", tmp_path / "adapters"
    run_ok(adapters, ["model=gpt2_tiny", *TINY, "model.lora.rank=4", base, "train.train_iters=4", SAVES])
    run_ok(tmp_path / "run", [f"checkpoint.load=file://{adapters / 'checkpoints'}", base, "train.train_iters=6"])
    assert saved(tmp_path / "run")[-1] == 6
