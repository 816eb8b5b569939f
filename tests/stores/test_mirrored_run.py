"""A training run with a mirror: what is in the store at its end, after a kill, and while the store is away."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from reprise.errors import ConfigError
from reprise.folder import iteration_name
from reprise.format.mirror_record import MIRROR
from reprise.stores.mirror import MirrorOptions, mirror
from tests.harness import TINY, launch, run_ok
from tests.stores.saving import assert_whole, committed, content

WAIT_S = 60.0


def settings(store: Path, *more: str) -> list[str]:
    saves = (
        "checkpoint.save_interval=2",
        "checkpoint.save_weights_interval=4",
        "train.train_iters=6",
        "schedule.lr_decay_iters=6",
    )
    return [*TINY, *saves, f"checkpoint.mirror=file://{store}", *more]


def mirrors() -> list[int]:
    """Return the processes of mirrors whose parent is gone."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if words else 0
        except OSError:
            continue
        if b"reprise.stores.mirror" in words and parent == 1:
            found.append(int(entry.name))
    return found


def test_a_run_is_in_the_store_at_its_end(tmp_path: Path) -> None:
    run, store = tmp_path / "run", tmp_path / "store"
    ended = run_ok(run, settings(store, "checkpoint.max_checkpoint_keep=1"))
    names = [*map(iteration_name, (2, 4, 6)), "weights/iter_0000004"]
    record = json.loads((run / "checkpoints" / MIRROR).read_text())
    assert sorted(record["committed"]) == names
    assert sorted(str(path.parent.relative_to(store)) for path in store.rglob("manifest.json")) == names
    newest = iteration_name(6)
    assert content(store / newest) == content(run / "checkpoints" / newest)
    assert "not in file://" not in ended.text
    saved = json.loads((store / newest / "run_config.json").read_text())
    assert saved["config"]["checkpoint"]["mirror"] == f"file://{store}"


def test_a_killed_run_takes_its_mirror_along_and_catches_up(tmp_path: Path) -> None:
    run, store = tmp_path / "run", tmp_path / "store"
    launch(run, settings(store), ranks=2, kill_after=5, saved=4)
    deadline = time.monotonic() + WAIT_S
    while mirrors():
        assert time.monotonic() < deadline
        os.sched_yield()
    run_ok(run, settings(store), ranks=2)
    assert assert_whole(store, run / "checkpoints") == [*map(iteration_name, (2, 4, 6)), "weights/iter_0000004"]


def test_a_store_that_is_away_ends_no_run_and_is_named(tmp_path: Path) -> None:
    run, store = tmp_path / "run", tmp_path / "file"
    store.write_text("no folder")
    ended = run_ok(run, settings(store, "checkpoint.mirror_wait_s=1", "checkpoint.max_checkpoint_keep=1"))
    assert f"not in file://{store} yet: iteration 2, 4, 6, weights/4. `reprise checkpoint mirror" in ended.text
    committed = [path.name for path in (run / "checkpoints").glob("iter_*")]
    assert sorted(committed) == [*map(iteration_name, (2, 4, 6))]
    store.unlink()
    run_ok(run, settings(store, "checkpoint.max_checkpoint_keep=1"))  # nothing to train, all to upload
    assert assert_whole(store, run / "checkpoints") == [*map(iteration_name, (2, 4, 6)), "weights/iter_0000004"]


def test_the_next_start_uploads_local_checkpoints(tmp_path: Path) -> None:
    run, local, store = tmp_path / "run", tmp_path / "local", tmp_path / "file"
    store.write_text("no folder")
    saves = ("checkpoint.save_interval=2", "checkpoint.save=null", f"checkpoint.local.dir={local}")
    words = [*TINY, *saves, "checkpoint.local.save_interval=2", "train.train_iters=6", "schedule.lr_decay_iters=6"]
    words += [f"checkpoint.mirror=file://{store}", "checkpoint.mirror_interval=3", "checkpoint.local.keep=1"]
    ended = run_ok(run, [*words, "checkpoint.mirror_wait_s=1"])
    assert f"not in file://{store} yet: iteration 6. the next start on these hosts uploads them" in ended.text
    assert [path.name for path in local.glob("iter_*")] == [iteration_name(6)]
    store.unlink()
    run_ok(run, words)  # nothing to train, all to upload
    name = iteration_name(6)
    assert committed(store) == [name]
    assert content(store / name).items() <= content(local / name).items()
    assert sorted(json.loads((local / MIRROR).read_text())["committed"]) == [name]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("checkpoint.mirror=/a/folder", "checkpoint.mirror=/a/folder: must be the URL of a store"),
        ("checkpoint.mirror=s3://b/run checkpoint.save=null", "needs checkpoint.save or checkpoint.local.dir"),
        ("checkpoint.mirror=s3://key:secret@b/run", "has a user, a query or a fragment"),
        ("checkpoint.mirror_interval=0", "checkpoint.mirror_interval=0: must be 1 or more"),
    ],
)
def test_a_mirror_that_cannot_be_is_refused(tmp_path: Path, words: str, problem: str) -> None:
    ended = launch(tmp_path / "run", [*TINY, *words.split()])
    assert not ended.ok
    assert problem in ended.text
    assert "secret" not in ended.text.replace("AWS_SECRET", "")


def test_a_mirror_in_the_folder_of_the_run_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    inside = f"file://{run / 'checkpoints' / 'weights'}"
    refused = launch(run, settings(run / "checkpoints", "checkpoint.mirror_keep=1"))
    assert not refused.ok
    assert f"lies in the folder that it mirrors ({run / 'checkpoints'})" in refused.text
    with pytest.raises(ConfigError, match="lies in the folder"):
        mirror(MirrorOptions(run, inside, once=True))


def test_a_lost_folder_is_no_fresh_start_beside_its_mirror(tmp_path: Path) -> None:
    run, store, unbroken = tmp_path / "run", tmp_path / "store", tmp_path / "unbroken"
    run_ok(run, settings(store, "train.train_iters=4"))
    run_ok(unbroken, settings(tmp_path / "other"))
    shutil.move(run / "checkpoints", tmp_path / "aside")  # a disk of its own that is gone
    refused = launch(run, settings(store))
    assert f"go on from the mirror with checkpoint.load=file://{store}" in refused.text
    shutil.rmtree(run)
    for load, fix in (("auto", f"Go on from there with checkpoint.load=file://{store}"), ("none", "Start over with")):
        refused = launch(run, settings(store, f"checkpoint.load={load}"))
        assert not refused.ok
        assert "The mirror has checkpoints, but this run has none to continue from" in refused.text
        assert "iteration 4 in the mirror" in refused.text
        assert fix in refused.text
    again = settings(store, f"checkpoint.load=file://{store}")
    run_ok(run, again)
    run_ok(run, again)  # the same command goes on from its own
    names = [*map(iteration_name, (2, 4, 6)), "weights/iter_0000004"]
    assert sorted(str(path.parent.relative_to(store)) for path in store.rglob("manifest.json")) == names
    stored, saved = (folder / iteration_name(6) for folder in (store, unbroken / "checkpoints"))
    for path in saved.glob("*.safetensors"):
        assert (stored / path.name).read_bytes() == path.read_bytes()
