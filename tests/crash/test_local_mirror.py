"""Runs without a folder that all hosts share, and with a mirror: their hosts upload local checkpoints together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.crash.outcomes import assert_ends_as
from tests.crash.test_local_checkpoints import BASE, EVERY_2, LOCAL, TP2_PP2, ZERO3, Fleet, copies_on, exit_after
from tests.harness import checkpoint, run_ok, tensor_files
from tests.profiles import nightly
from tests.stores.saving import committed, content

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("topology", "ranks_per_host"), [(ZERO3, 1), nightly(TP2_PP2, 2)], ids=["zero3", "tp2"])
def test_a_run_goes_on_from_the_store_without_any_of_its_hosts(
    tmp_path: Path, topology: tuple[str, ...], ranks_per_host: int
) -> None:
    fleet, whole, store = Fleet(tmp_path), tmp_path / "whole", tmp_path / "store"
    run_ok(whole, [*BASE, *topology, EVERY_2, exit_after(4)], ranks=2 * ranks_per_host)
    mirror = [*LOCAL, copies_on(0), "checkpoint.local.keep=1", f"checkpoint.mirror=file://{store}"]
    ended = fleet.train([0, 1], *topology, *mirror, exit_after(4), ranks_per_host=ranks_per_host)
    assert "not in file://" not in ended.text
    assert "iter_0000004" in committed(store)
    assert tensor_files(store / "iter_0000004") == tensor_files(checkpoint(whole, 4))
    assert content(store / "iter_0000004").keys() == content(checkpoint(whole, 4)).keys()
    assert not list(fleet.disk(0).glob("*/hold.*"))
    for folder in (fleet.disk(0), fleet.disk(1), fleet.run):
        shutil.rmtree(folder)
    ends = tmp_path / "again", tmp_path / "as_before"
    for run, load in zip(ends, (f"file://{store}", whole / "checkpoints"), strict=True):
        run_ok(run, [*BASE, f"checkpoint.load={load}", "checkpoint.reshard=true"])
    assert_ends_as(*ends)
