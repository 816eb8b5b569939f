"""Hosts that save into folders of their own: killed, swapped, wiped, added, they go on bit for bit."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from reprise.loading import open_checkpoint
from reprise.storage import Files, iteration_name
from tests.crash.hosts import Mount, on_hosts, run_trainer, union
from tests.crash.moments import Gate, describe, train_with_gate
from tests.crash.outcomes import assert_ends_as, saved
from tests.harness import TINY, Ended, call_on_ranks, checkpoint, curve, run_ok, started, tensor_files
from tests.profiles import nightly

pytestmark = pytest.mark.slow

BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=6", "model.dropout=0.1", "checkpoint.commit_timeout_s=60")
ZERO3 = ("parallel.zero_stage=3",)
TP2_PP2 = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")
EVERY_2 = "checkpoint.save_interval=2"


def exit_after(iteration: int) -> str:
    return f"train.exit_interval={iteration}"


def copies_on(hosts: int) -> str:
    return f"checkpoint.local.copies={hosts}"


class Fleet:
    """Hosts with a disk each, all mounted at one path, and a run folder that they share."""

    def __init__(self, folder: Path) -> None:
        self.run, self.mount, self._folder = folder / "run", folder / "local", folder
        self.mount.mkdir()
        self._launches = 0

    def disk(self, number: int) -> Path:
        """Return a disk, which is made if it is new."""
        path = self._folder / f"disk{number}"
        path.mkdir(exist_ok=True)
        return path

    def train(
        self,
        disks: Sequence[int],
        *overrides: str,
        ranks_per_host: int = 1,
        function: Callable[[list[str]], None] = run_trainer,
        shares_run: bool = True,
        status: int | None = 0,
    ) -> Ended:
        """Run the trainer, or `function` in its place, on a host for each of these disks.

        Args:
            shares_run: whether the hosts see one folder of the run; else each has its own, on its disk.
            status: how every rank is to end; None for any way.
        """
        self._launches += 1
        mounts = {host: [Mount(self.mount, self.disk(disk))] for host, disk in enumerate(disks)}
        for host, disk in enumerate(() if shares_run else disks):
            self.run.mkdir(exist_ok=True)
            mounts[host].insert(0, Mount(self.run, self.disk(disk + 10)))
        function = on_hosts(function, mounts, ranks_per_host=ranks_per_host)
        arguments = [f"run.dir={self.run}", f"checkpoint.local.dir={self.mount}", *BASE, *overrides]
        folder, ranks = self._folder / f"launch{self._launches}", len(disks) * ranks_per_host
        ended = call_on_ranks(function, arguments, folder=folder, ranks=ranks)
        assert status is None or set(ended.statuses) == {status}, ended.text
        return ended

    def copy(self, folder: Path) -> Path:
        """Take over the run and the disks of the fleet in a folder, and return the folder of this one."""
        shutil.copytree(folder, self._folder, dirs_exist_ok=True)
        return self._folder

    def iteration(self, disk: int, iteration: int) -> Path:
        """Return the folder of an iteration on a disk."""
        return self.disk(disk) / iteration_name(iteration)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


LOCAL = ("checkpoint.save=null", "checkpoint.local.save_interval=2")
EACH = (*ZERO3, "checkpoint.save=null", "checkpoint.local.save_interval=1")

Prepare = Callable[..., Path]


@pytest.fixture(scope="module")
def prepare(tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """Return a function that trains four iterations on two hosts, and returns a run of all that saved into one folder.

    Tests with the same settings get copies of one such fleet.
    """
    fleets: dict[tuple[tuple[str, ...], int, int], Path] = {}

    def prepared(fleet: Fleet, topology: tuple[str, ...] = ZERO3, *, copies: int, ranks_per_host: int = 1) -> Path:
        key = topology, copies, ranks_per_host
        if key not in fleets:
            root = fleets[key] = tmp_path_factory.mktemp("fleet")
            run_ok(root / "whole", [*BASE, *topology, EVERY_2], ranks=2 * ranks_per_host)
            local = [*topology, *LOCAL, copies_on(copies), exit_after(4)]
            Fleet(root).train([0, 1], *local, ranks_per_host=ranks_per_host)
        return fleet.copy(fleets[key]) / "whole"

    return prepared


@pytest.mark.parametrize(
    ("topology", "ranks_per_host", "copies"),
    [(ZERO3, 1, 1), nightly(ZERO3, 1, 0), nightly(TP2_PP2, 2, 0), nightly(TP2_PP2, 2, 1)],
    ids=["zero3 copies", "zero3", "tp2 pp2", "tp2 pp2 copies"],
)
def test_two_hosts_hold_the_checkpoint_together(
    fleet: Fleet, prepare: Prepare, topology: tuple[str, ...], ranks_per_host: int, copies: int
) -> None:
    whole = prepare(fleet, topology, copies=copies, ranks_per_host=ranks_per_host)
    shared = tensor_files(checkpoint(whole, 4))
    paths = [fleet.iteration(disk, 4) for disk in (0, 1)]
    for path in paths:
        assert open_checkpoint(path, Files()).is_whole == bool(copies)
        assert (tensor_files(path) == shared) == bool(copies)
    assert union(paths) == shared
    again = fleet.train([0, 1], *topology, *LOCAL, copies_on(copies), ranks_per_host=ranks_per_host)
    # Without copies, each host takes from the other what that one wrote for both: step counts, and a tied table.
    expected = "all local" if copies else "0.0 MB from host0, 0.0 MB from host1;"
    assert f"loaded iteration 4: {expected}" in again.outputs[0]
    assert curve(fleet.run) == curve(whole)


def test_a_wiped_disk_is_filled_from_the_copy(fleet: Fleet, tmp_path: Path, prepare: Prepare) -> None:
    whole = prepare(fleet, copies=1)
    shutil.copytree(fleet.disk(1), tmp_path / "kept")
    fleet.train([2, 1], *ZERO3, *LOCAL, exit_after(4))
    shutil.rmtree(fleet.disk(1))
    (tmp_path / "kept").rename(fleet.disk(1))
    again = fleet.train([4, 1], *ZERO3, *LOCAL)
    assert re.search(r"loaded iteration 4: 0\.\d MB from host1;", again.outputs[0])
    assert curve(fleet.run) == curve(whole)
    assert tensor_files(fleet.iteration(4, 6)) == tensor_files(checkpoint(whole, 6))


def test_a_wiped_disk_without_copies_is_refused_by_name(fleet: Fleet, prepare: Prepare) -> None:
    prepare(fleet, copies=0)
    again = fleet.train([0, 2], *ZERO3, *LOCAL, status=1)
    assert all("1 of 2 parts: host1" in output for output in again.outputs)
    other = fleet.train([0, 1], *ZERO3, *LOCAL, "model.n_layer=3", status=1)
    assert "model.n_layer" in other.outputs[0]


def test_a_wiped_disk_sends_the_run_back_to_the_shared_folder(fleet: Fleet, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run_ok(whole, [*BASE, *ZERO3, EVERY_2], ranks=2)
    overrides = [*ZERO3, "checkpoint.local.save_interval=1", EVERY_2, copies_on(0)]
    fleet.train([0, 1], *overrides, exit_after(3), "checkpoint.local.flush_on_exit=false")
    assert saved(fleet.run) == [2]
    again = fleet.train([0, 2], *overrides)
    assert "local iteration 3 lacks " in again.outputs[0]
    assert_ends_as(fleet.run, whole)
    fleet.train([0, 2], *overrides)  # finished: nothing is saved again
    assert saved(fleet.run) == saved(whole)


@pytest.mark.parametrize("disks", [[0], nightly([1]), [1, 2, 0]])
def test_another_number_of_hosts_resumes(fleet: Fleet, prepare: Prepare, disks: list[int]) -> None:
    whole = prepare(fleet, copies=1)
    again = fleet.train(disks, *ZERO3, *LOCAL, "checkpoint.reshard=true")
    assert "loaded iteration 4:" in again.outputs[0]
    ours, theirs = ([float.fromhex(row[1]) for row in curve(run)] for run in (fleet.run, whole))
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_hosts_that_are_killed_and_swapped_resume(fleet: Fleet, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run_ok(whole, [*BASE, *ZERO3], ranks=2)
    mounts = {host: [Mount(fleet.mount, fleet.disk(host))] for host in (0, 1)}
    arguments = [f"run.dir={fleet.run}", f"checkpoint.local.dir={fleet.mount}", *BASE, *EACH]
    gate = Gate.at(tmp_path / "gate", "step", 4, (0, 1))
    function = on_hosts(train_with_gate, mounts)
    with started(function, [describe([gate]), *arguments], folder=fleet.run, ranks=2) as running:
        gate.await_reached()
        for rank in (0, 1):
            running.send(rank, signal.SIGKILL)
    again = fleet.train([1, 0], *EACH)
    assert re.search("loaded iteration [23]:", again.outputs[0])
    assert curve(fleet.run) == curve(whole)


BACK = "checkpoint.ckpt_step=2"
OTHER_DROPOUT = ("model.dropout=0.2", "checkpoint.override_dropout=true")


@pytest.fixture(scope="module")
def rewound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the end of a run in one folder that went back from iteration 4 to 2 and on with another dropout."""
    run, saves = tmp_path_factory.mktemp("rewound") / "run", "checkpoint.save_interval=1"
    run_ok(run, [*BASE, *ZERO3, saves, exit_after(4)], ranks=2)
    run_ok(run, [*BASE, *ZERO3, saves, BACK, *OTHER_DROPOUT], ranks=2)
    return tensor_files(checkpoint(run, 6))
