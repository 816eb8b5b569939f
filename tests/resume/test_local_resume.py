"""A run of one host that saves into a local folder, with and without a shared one beside it."""

from __future__ import annotations

from pathlib import Path

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


def test_a_fresh_start_leaves_local_checkpoints_until_it_saves(tmp_path: Path) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = [*BASE, *ALONE, f"checkpoint.local.dir={local}"]
    run_ok(run, [*overrides, "train.exit_interval=3"])
    before = all_files(local / "iter_0000003")
    refused = launch(run, [*overrides, "train.seed=5"])
    assert "The checkpoint belongs to another run" in refused.text
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
