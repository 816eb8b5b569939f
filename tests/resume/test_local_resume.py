"""A run of one host that saves into a local folder, with and without a shared one beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness import TINY, all_files, curve, launch, run_ok, tensor_files

ITERATIONS = 6
BASE = ("model=gpt2_tiny", *TINY, f"train.train_iters={ITERATIONS}", "model.dropout=0.1")
ALONE = ("checkpoint.save=null", "checkpoint.local.save_interval=1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of all iterations, each of which it saved."""
    run = tmp_path_factory.mktemp("whole") / "run"
    run_ok(run, [*BASE, "checkpoint.save_interval=1"])
    return run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("iter_*"))


def test_a_killed_run_resumes_from_its_local_folder(tmp_path: Path, whole: Path) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = [*BASE, *ALONE, f"checkpoint.local.dir={local}"]
    killed = launch(run, overrides, kill_after=4)
    assert killed.statuses == (-9,)
    newest = int(names(local)[-1][5:])
    assert newest >= 2  # a save waits for the one before it
    ended = run_ok(run, overrides)
    assert f"loaded iteration {newest}: 100 % local, 0 % shared" in ended.text
    assert curve(run) == curve(whole)
    assert names(local) == ["iter_0000005", "iter_0000006"]
    for name in names(local):
        assert tensor_files(local / name) == tensor_files(whole / "checkpoints" / name)
        assert (local / name / "trainer_state.json").exists()


def test_a_run_keeps_as_many_local_checkpoints_as_it_is_set_to(tmp_path: Path) -> None:
    local = tmp_path / "local"
    run_ok(tmp_path / "run", [*BASE, *ALONE, f"checkpoint.local.dir={local}", "checkpoint.local.keep=3"])
    assert names(local) == ["iter_0000004", "iter_0000005", "iter_0000006"]


@pytest.mark.parametrize("flushes", [True, False])
def test_a_run_that_stops_early_saves_into_both_folders(tmp_path: Path, whole: Path, flushes: bool) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = [
        *BASE,
        "checkpoint.save_interval=2",
        f"checkpoint.local.dir={local}",
        "checkpoint.local.save_interval=3",
    ]
    run_ok(run, [*overrides, "train.exit_interval=5", f"checkpoint.local.flush_on_exit={str(flushes).lower()}"])
    assert names(local) == ["iter_0000003", "iter_0000005"]
    expected = ["iter_0000002", "iter_0000004", *(["iter_0000005"] if flushes else [])]
    assert names(run / "checkpoints") == expected
    ended = run_ok(run, overrides)
    assert "loaded iteration 5: 100 % local" in ended.text
    assert curve(run) == curve(whole)
    assert names(run / "checkpoints")[-1] == "iter_0000006"  # the end of a run is saved in both in any case


def test_the_newest_of_both_folders_is_loaded(tmp_path: Path, whole: Path) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = [
        *BASE,
        "checkpoint.save_interval=4",
        f"checkpoint.local.dir={local}",
        "checkpoint.local.save_interval=3",
    ]
    run_ok(run, [*overrides, "train.exit_interval=4"])
    (local / "iter_0000004").rename(tmp_path / "lost")
    ended = run_ok(run, overrides)
    assert "iteration 4 from" in ended.text
    assert "local, " not in ended.text
    assert curve(run) == curve(whole)


def test_a_named_iteration_is_loaded_from_the_local_folder(tmp_path: Path, whole: Path) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = [*BASE, *ALONE, f"checkpoint.local.dir={local}", "checkpoint.local.keep=6"]
    run_ok(run, [*overrides, "train.exit_interval=5"])
    ended = run_ok(run, [*overrides, "checkpoint.ckpt_step=3", "train.exit_interval=4"])
    assert "loaded iteration 3: 100 % local" in ended.text
    # What the new branch overtakes is dropped with its first checkpoint.
    assert names(local) == [f"iter_{number:07d}" for number in (1, 2, 3, 4)]
    run_ok(run, overrides)
    assert curve(run) == curve(whole)


def test_a_named_iteration_stays_where_nothing_else_has_it(tmp_path: Path) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    folders = [f"checkpoint.local.dir={local}", "checkpoint.local.save_interval=1", "checkpoint.save_interval=4"]
    run_ok(run, [*BASE, *folders, "train.exit_interval=3", "checkpoint.local.flush_on_exit=false"])
    run_ok(run, [*BASE, *folders, "checkpoint.ckpt_step=2", "train.exit_interval=5"])
    assert names(local) == ["iter_0000002", "iter_0000004", "iter_0000005"]
    run_ok(run, [*BASE, *folders, "checkpoint.ckpt_step=4"])
    assert names(local) == ["iter_0000005", "iter_0000006"]


def test_a_fresh_start_leaves_local_checkpoints_until_it_saves(tmp_path: Path) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = [*BASE, *ALONE, f"checkpoint.local.dir={local}"]
    run_ok(run, [*overrides, "train.exit_interval=3"])
    before = all_files(local / "iter_0000003")
    refused = launch(run, [*overrides, "train.seed=5"])
    assert "This command differs from the run that it resumes" in refused.text
    assert all_files(local / "iter_0000003") == before
    run_ok(run, [*overrides, "train.seed=5", "checkpoint.load=none", "train.exit_interval=2"])
    assert names(local) == ["iter_0000001", "iter_0000002"]


def test_weights_only_runs_keep_their_moments_locally(tmp_path: Path, whole: Path) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = [
        *BASE,
        "checkpoint.no_save_optim=true",
        "checkpoint.save_interval=2",
        f"checkpoint.local.dir={local}",
        "checkpoint.local.save_interval=2",
    ]
    run_ok(run, [*overrides, "train.exit_interval=4"])
    run_ok(run, overrides)
    assert curve(run) == curve(whole)


def run_member(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text())
    member: dict[str, Any] = state["run"]
    return member


@pytest.mark.parametrize("more", [("checkpoint.load=none",), ("model.n_embd=60",)])
def test_local_checkpoints_of_another_run_are_refused(tmp_path: Path, more: tuple[str, ...]) -> None:
    local = tmp_path / "local"
    overrides = [*BASE, "checkpoint.save_interval=2", f"checkpoint.local.dir={local}", "train.exit_interval=3"]
    run_ok(tmp_path / "first", overrides)
    before = all_files(local)
    refused = launch(tmp_path / "second", [*overrides, *more])
    assert refused.statuses == (1,), refused.text
    assert "A folder of local checkpoints belongs to another run" in refused.text
    named = run_member(local / "iter_0000003")["branches"][0]["id"]
    assert f"those of run {named}" in refused.text
    assert "checkpoint.local.adopt=true" in refused.text
    assert all_files(local) == before
    assert not list((tmp_path / "second").glob("checkpoints/iter_*"))


def test_a_run_whose_folder_is_deleted_does_not_go_on_unasked(tmp_path: Path, whole: Path) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = [*BASE, *ALONE, f"checkpoint.local.dir={local}"]
    run_ok(run, [*overrides, "train.exit_interval=3"])
    first = run_member(local / "iter_0000003")
    shutil.rmtree(run)
    refused = launch(run, overrides)
    assert "A folder of local checkpoints belongs to another run" in refused.text
    ended = run_ok(run, [*overrides, "checkpoint.local.adopt=true"])
    assert "loaded iteration 3: 100 % local" in ended.text
    assert run_member(local / "iter_0000006") == first
    assert tensor_files(local / "iter_0000006") == tensor_files(whole / "checkpoints/iter_0000006")


def stopped_at_3(folder: Path) -> tuple[Path, Path, list[str]]:
    """Return a run, its local folder and its overrides; it saved 2 in the shared folder, and 3 in both."""
    run, local = folder / "run", folder / "local"
    local_saves = [f"checkpoint.local.dir={local}", "checkpoint.local.save_interval=1"]
    overrides = [*BASE, "checkpoint.save_interval=2", *local_saves]
    run_ok(run, [*overrides, "train.exit_interval=3"])
    return run, local, overrides


@pytest.mark.slow
def test_shared_checkpoints_name_the_run_whose_record_is_lost(tmp_path: Path, whole: Path) -> None:
    run, local, overrides = stopped_at_3(tmp_path)
    first = run_member(local / "iter_0000003")
    (run / "run.json").unlink()
    ended = run_ok(run, overrides)
    assert "loaded iteration 3: 100 % local" in ended.text
    assert run_member(run / "checkpoints/iter_0000006") == first
    assert curve(run) == curve(whole)


@pytest.mark.slow
def test_a_damaged_record_of_a_run_is_made_anew(tmp_path: Path, whole: Path) -> None:
    run, local, overrides = stopped_at_3(tmp_path)
    good = (run / "run.json").read_bytes()
    for path in (run / "run.json", local / "run.json"):
        path.write_bytes(good.replace(b"began_at", b"begun_at"))
    ended = run_ok(run, overrides)
    assert "A record of a run is damaged" in ended.text
    assert (run / "run.json").read_bytes() == (local / "run.json").read_bytes() == good
    assert curve(run) == curve(whole)


@pytest.mark.slow
def test_a_run_from_anothers_checkpoint_is_a_run_of_its_own(tmp_path: Path) -> None:
    first, second, local = tmp_path / "first", tmp_path / "second", tmp_path / "local"
    run_ok(first, [*BASE, "checkpoint.save_interval=2", "train.exit_interval=4"])
    source = first / "checkpoints/iter_0000002"
    overrides = [*BASE, f"checkpoint.load={source}", "checkpoint.save_interval=2", f"checkpoint.local.dir={local}"]
    run_ok(second, [*overrides, "train.exit_interval=4"])
    run_ok(second, overrides)
    saved, parent = run_member(second / "checkpoints/iter_0000006"), run_member(source)["branches"][0]["id"]
    assert saved["parent"] == {"run": parent, "iteration": 2}
    assert len(saved["branches"]) == 1
    assert saved["branches"][0]["id"] != parent


def test_a_rewind_begins_a_branch_and_a_resume_does_not(tmp_path: Path) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = [*BASE, *ALONE, f"checkpoint.local.dir={local}", "checkpoint.local.keep=6"]
    run_ok(run, [*overrides, "train.exit_interval=3"])
    run_ok(run, [*overrides, "train.exit_interval=4"])
    (first,) = run_member(local / "iter_0000004")["branches"]
    assert first["began_at"] == -1
    run_ok(run, [*overrides, "checkpoint.ckpt_step=2", "train.exit_interval=3"])
    assert [branch["began_at"] for branch in run_member(local / "iter_0000003")["branches"]] == [-1, 2]
    run_ok(run, [*overrides, "checkpoint.load=none", "train.exit_interval=1"])
    assert [branch["began_at"] for branch in run_member(local / "iter_0000001")["branches"]] == [-1, 2, -1]
