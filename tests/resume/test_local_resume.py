"""A run of one host that saves into a local folder, with and without a shared one beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from reprise.format import Journal
from tests.harness import TINY, all_files, checkpoint, curve, launch, run_ok, tensor_files

BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=6", "model.dropout=0.1")
ALONE = ("checkpoint.save=null", "checkpoint.local.save_interval=1")
OTHERS = "A folder of local checkpoints belongs to another run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of all iterations, each of which it saved."""
    run = tmp_path_factory.mktemp("whole") / "run"
    run_ok(run, [*BASE, "checkpoint.save_interval=1"])
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def names(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*"))


def run_member(checkpoint: Path) -> dict[str, Any]:
    member: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text())["run"]
    return member


def test_a_killed_run_resumes_from_its_local_folder(run: Path, local: Path, whole: Path) -> None:
    overrides = [*BASE, *ALONE, f"checkpoint.local.dir={local}"]
    assert launch(run, overrides, kill_after=4).statuses == (-9,)
    newest = names(local)[-1]
    assert newest >= 2  # a save waits for the one before it
    assert f"loaded iteration {newest}: all local" in run_ok(run, overrides).text
    assert curve(run) == curve(whole)
    assert names(local) == [5, 6]
    for number in (5, 6):
        folder = local / f"iter_{number:07d}"
        assert tensor_files(folder) == tensor_files(checkpoint(whole, number))
        assert (folder / "trainer_state.json").exists()


@pytest.mark.parametrize("flushes", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_stops_early_saves_into_both_folders(run: Path, local: Path, whole: Path, flushes: bool) -> None:
    intervals = ["checkpoint.save_interval=2", "checkpoint.local.save_interval=3"]
    overrides = [*BASE, *intervals, f"checkpoint.local.dir={local}"]
    run_ok(run, [*overrides, "train.exit_interval=5", f"checkpoint.local.flush_on_exit={str(flushes).lower()}"])
    assert names(local) == [3, 5]
    assert names(run / "checkpoints") == [2, 4, *([5] if flushes else [])]
    assert "loaded iteration 5: all local" in run_ok(run, overrides).text
    assert curve(run) == curve(whole)
    assert names(run / "checkpoints")[-1] == 6  # the end of a run is saved in both in any case


@pytest.mark.slow
def test_the_newest_of_both_folders_is_loaded(run: Path, local: Path, whole: Path, tmp_path: Path) -> None:
    intervals = ["checkpoint.save_interval=4", "checkpoint.local.save_interval=3"]
    overrides = [*BASE, *intervals, f"checkpoint.local.dir={local}"]
    run_ok(run, [*overrides, "train.exit_interval=4"])
    (local / "iter_0000004").rename(tmp_path / "lost")
    ended = run_ok(run, overrides)
    assert "iteration 4 from" in ended.text
    assert "local, " not in ended.text
    assert curve(run) == curve(whole)


def test_a_named_iteration_is_loaded_from_the_local_folder(run: Path, local: Path, whole: Path) -> None:
    overrides = [*BASE, *ALONE, f"checkpoint.local.dir={local}", "checkpoint.local.keep=6"]
    run_ok(run, [*overrides, "train.exit_interval=5"])
    assert names(local) == [1, 2, 3, 4, 5]
    (first,) = run_member(local / "iter_0000005")["branches"]
    assert first["began_at"] == -1
    ended = run_ok(run, [*overrides, "checkpoint.ckpt_step=3", "train.exit_interval=4"])
    assert "loaded iteration 3: all local" in ended.text
    # What the new branch overtakes is dropped with its first checkpoint.
    assert names(local) == [1, 2, 3, 4]
    run_ok(run, overrides)
    assert curve(run) == curve(whole)
    # A rewind begins a branch, and so does a fresh start; a resume does not.
    assert [branch["began_at"] for branch in run_member(local / "iter_0000006")["branches"]] == [-1, 3]
    run_ok(run, [*overrides, "checkpoint.load=none", "train.exit_interval=1"])
    assert [branch["began_at"] for branch in run_member(local / "iter_0000001")["branches"]] == [-1, 3, -1]


@pytest.mark.slow
def test_a_named_iteration_stays_where_nothing_else_has_it(run: Path, local: Path) -> None:
    folders = [f"checkpoint.local.dir={local}", "checkpoint.local.save_interval=1", "checkpoint.save_interval=4"]
    run_ok(run, [*BASE, *folders, "train.exit_interval=3", "checkpoint.local.flush_on_exit=false"])
    run_ok(run, [*BASE, *folders, "checkpoint.ckpt_step=2", "train.exit_interval=5"])
    assert names(local) == [2, 4, 5]
    run_ok(run, [*BASE, *folders, "checkpoint.ckpt_step=4"])
    assert names(local) == [5, 6]


@pytest.mark.slow
def test_a_fresh_start_leaves_local_checkpoints_until_it_saves(run: Path, local: Path) -> None:
    overrides = [*BASE, *ALONE, f"checkpoint.local.dir={local}", "train.seed=5"]
    run_ok(run, [*overrides[:-1], "train.exit_interval=3"])
    before = all_files(local / "iter_0000003")
    assert "train.seed" in launch(run, overrides).text
    assert all_files(local / "iter_0000003") == before
    run_ok(run, [*overrides, "checkpoint.load=none", "train.exit_interval=2"])
    assert names(local) == [1, 2]


@pytest.mark.parametrize("more", ["checkpoint.load=none", pytest.param("model.n_embd=60", marks=pytest.mark.slow)])
def test_local_checkpoints_of_another_run_are_refused(tmp_path: Path, run: Path, local: Path, more: str) -> None:
    overrides = [*BASE, "checkpoint.save_interval=2", f"checkpoint.local.dir={local}", "train.exit_interval=3"]
    run_ok(run, overrides)
    before, named = all_files(local), run_member(local / "iter_0000003")["branches"][0]["id"]
    refused = launch(tmp_path / "second", [*overrides, more])
    assert refused.statuses == (1,), refused.text
    assert OTHERS in refused.text
    assert f"those of run {named}" in refused.text
    assert "copy run.json from there" in refused.text
    assert all_files(local) == before
    assert not list((tmp_path / "second").glob("checkpoints/iter_*"))


@pytest.mark.slow
def test_a_run_whose_folder_is_deleted_does_not_go_on_unasked(run: Path, local: Path, whole: Path) -> None:
    overrides = [*BASE, *ALONE, f"checkpoint.local.dir={local}"]
    run_ok(run, [*overrides, "train.exit_interval=3"])
    first = run_member(local / "iter_0000003")
    shutil.rmtree(run)
    assert OTHERS in launch(run, overrides).text
    run.mkdir(exist_ok=True)
    shutil.copy(local / "run.json", run)
    assert "loaded iteration 3: all local" in run_ok(run, overrides).text
    assert run_member(local / "iter_0000006") == first
    assert tensor_files(local / "iter_0000006") == tensor_files(checkpoint(whole, 6))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["lost", "damaged"])
def test_a_lost_or_damaged_record_of_a_run_is_made_anew(run: Path, local: Path, whole: Path, loss: str) -> None:
    local_saves = [f"checkpoint.local.dir={local}", "checkpoint.local.save_interval=1"]
    overrides = [*BASE, "checkpoint.save_interval=2", *local_saves]
    run_ok(run, [*overrides, "train.exit_interval=3"])
    first, good = run_member(local / "iter_0000003"), (local / "run.json").read_bytes()
    if loss == "lost":
        (run / "run.json").unlink()
    else:
        for path in (run / "run.json", local / "run.json"):
            path.write_bytes(path.read_bytes().replace(b"began_at", b"begun_at"))
    assert "loaded iteration 3: all local" in run_ok(run, overrides).text
    assert (local / "run.json").read_bytes() == good
    journal = Journal.from_bytes((run / "run.json").read_bytes(), where=run)
    assert journal == Journal(Journal.from_bytes(good, where=local).lineage, 6)
    assert run_member(checkpoint(run, 6)) == first
    assert curve(run) == curve(whole)


@pytest.mark.slow
def test_a_run_from_anothers_checkpoint_is_a_run_of_its_own(tmp_path: Path, run: Path, local: Path) -> None:
    run_ok(tmp_path / "first", [*BASE, "checkpoint.save_interval=2", "train.exit_interval=4"])
    source = checkpoint(tmp_path / "first", 2)
    overrides = [*BASE, f"checkpoint.load={source}", "checkpoint.save_interval=2", f"checkpoint.local.dir={local}"]
    run_ok(run, [*overrides, "train.exit_interval=4"])
    run_ok(run, overrides)
    member, parent = run_member(checkpoint(run, 6)), run_member(source)["branches"][0]["id"]
    assert member["parent"] == {"run": parent, "iteration": 2}
    (branch,) = member["branches"]
    assert branch["id"] != parent
