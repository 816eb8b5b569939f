"""Runs without a folder that all hosts share, and with a mirror: their hosts upload local checkpoints together."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.crash.hosts import Link, union
from tests.crash.moments import describe
from tests.crash.test_local_checkpoints import BASE, LOCAL, TP2_PP2, ZERO3, Fleet
from tests.crash.test_two_hosts import link, train_on_host_with_disk
from tests.harness import call_on_ranks, run_ok, tensor_files
from tests.stores.saving import committed, content

__all__ = ["link"]  # a fixture
pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@pytest.mark.parametrize(
    ("topology", "ranks_per_host"),
    [(ZERO3, 1), pytest.param(TP2_PP2, 2, marks=pytest.mark.nightly)],
    ids=["zero3", "tp2"],
)
def test_a_run_goes_on_from_the_store_without_any_of_its_hosts(
    fleet: Fleet, tmp_path: Path, topology: tuple[str, ...], ranks_per_host: int
) -> None:
    whole, store = tmp_path / "whole", tmp_path / "store"
    run_ok(whole, [*BASE, *topology, "checkpoint.save_interval=2", "train.exit_interval=4"], ranks=2 * ranks_per_host)
    mirror = [*LOCAL, "checkpoint.local.copies=0", "checkpoint.local.keep=1", f"checkpoint.mirror=file://{store}"]
    ended = fleet.train([0, 1], [*topology, *mirror, "train.exit_interval=4"], ranks_per_host=ranks_per_host)
    assert ended.ok, ended.text
    assert "not in file://" not in ended.text
    assert "iter_0000004" in committed(store)
    shared = whole / "checkpoints" / "iter_0000004"
    assert tensor_files(store / "iter_0000004") == tensor_files(shared)
    assert content(store / "iter_0000004").keys() == content(shared).keys()
    assert not list(fleet.disk(0).glob("*/hold.*"))
    for disk in (0, 1):
        shutil.rmtree(fleet.disk(disk))
    shutil.rmtree(fleet.run)
    for name, load in (("again", f"file://{store}"), ("as_before", whole / "checkpoints")):
        run_ok(tmp_path / name, [*BASE, f"checkpoint.load={load}", "checkpoint.reshard=true"])
    ends = [tensor_files(tmp_path / name / "checkpoints" / "iter_0000006") for name in ("again", "as_before")]
    assert ends[0] == ends[1]


def test_mirrors_reach_each_other_over_the_network_of_the_ranks(link: Link, tmp_path: Path) -> None:
    mounted, disks, store, run = (
        tmp_path / "local",
        [tmp_path / "a", tmp_path / "b"],
        tmp_path / "store",
        tmp_path / "run",
    )
    for folder in (mounted, *disks):
        folder.mkdir()
    words = [json.dumps(list(map(str, (mounted, *disks)))), json.dumps(asdict(link)), describe([])]
    overrides = [*BASE, *ZERO3, *LOCAL, f"checkpoint.local.dir={mounted}", "checkpoint.local.copies=0"]
    arguments = [*words, f"run.dir={run}", *overrides, f"checkpoint.mirror=file://{store}"]
    ended = call_on_ranks(train_on_host_with_disk, arguments, folder=run, ranks=2)
    assert ended.ok, ended.text
    assert "not in file://" not in ended.text
    assert tensor_files(store / "iter_0000006") == union([disk / "iter_0000006" for disk in disks])
