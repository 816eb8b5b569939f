"""Hosts that save into folders of their own: killed, swapped, wiped, added, they go on bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from reprise.files import Files
from reprise.folder import CheckpointFolder
from reprise.loading.blocks import blocks_of
from reprise.reading import open_checkpoint, read_places
from tests.crash.hosts import Mount, on_hosts, run_trainer, union
from tests.crash.moments import Gate, describe, train_with_gate
from tests.harness import TINY, Ended, all_files, call_on_ranks, curve, run_ok, started, tensor_files

pytestmark = pytest.mark.slow

ITERATIONS = 6
BASE = (
    "model=gpt2_tiny",
    *TINY,
    f"train.train_iters={ITERATIONS}",
    "model.dropout=0.1",
    "checkpoint.commit_timeout_s=60",
)
ZERO3 = ("parallel.zero_stage=3",)
TP2_PP2 = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")


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
        overrides: Sequence[str],
        *,
        ranks_per_host: int = 1,
        function: Callable[[list[str]], None] = run_trainer,
        shares_run: bool = True,
    ) -> Ended:
        """Run the trainer, or `function` in its place, on a host for each of these disks.

        Args:
            shares_run: whether the hosts see one folder of the run; else each has its own, on its disk.
        """
        self._launches += 1
        mounts = {host: [Mount(self.mount, self.disk(disk))] for host, disk in enumerate(disks)}
        for host, disk in enumerate(() if shares_run else disks):
            self.run.mkdir(exist_ok=True)
            mounts[host].insert(0, Mount(self.run, self.disk(disk + 10)))
        function = on_hosts(function, mounts, ranks_per_host=ranks_per_host)
        arguments = [f"run.dir={self.run}", f"checkpoint.local.dir={self.mount}", *BASE, *overrides]
        folder, ranks = self._folder / f"launch{self._launches}", len(disks) * ranks_per_host
        return call_on_ranks(function, arguments, folder=folder, ranks=ranks)

    def copy(self, folder: Path) -> Path:
        """Take over the run and the disks of the fleet in a folder, and return the folder of this one."""
        shutil.copytree(folder, self._folder, dirs_exist_ok=True)
        return self._folder

    def iteration(self, disk: int, iteration: int) -> Path:
        """Return the folder of an iteration on a disk."""
        return self.disk(disk) / f"iter_{iteration:07d}"


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


LOCAL = ("checkpoint.save=null", "checkpoint.local.save_interval=2")
EACH = ("checkpoint.save=null", "checkpoint.local.save_interval=1")


Prepare = Callable[..., Path]


@pytest.fixture(scope="module")
def prepare(tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """Return a function that trains four iterations on two hosts, and returns a run of all that saved into one folder.

    Tests with the same settings get copies of one such fleet.
    """
    fleets: dict[tuple[tuple[str, ...], int, int], Path] = {}

    def prepared(fleet: Fleet, topology: tuple[str, ...], *, copies: int, ranks_per_host: int = 1) -> Path:
        key = topology, copies, ranks_per_host
        if key not in fleets:
            fleets[key] = tmp_path_factory.mktemp("fleet")
            _prepare(Fleet(fleets[key]), fleets[key] / "whole", topology, copies, ranks_per_host)
        return fleet.copy(fleets[key]) / "whole"

    return prepared


def _prepare(fleet: Fleet, whole: Path, topology: tuple[str, ...], copies: int, ranks_per_host: int) -> None:
    run_ok(whole, [*BASE, *topology, "checkpoint.save_interval=2"], ranks=2 * ranks_per_host)
    local = [*topology, *LOCAL, f"checkpoint.local.copies={copies}", "train.exit_interval=4"]
    ended = fleet.train([0, 1], local, ranks_per_host=ranks_per_host)
    assert ended.ok, ended.text


@pytest.mark.parametrize(
    ("topology", "ranks_per_host", "copies"),
    [
        pytest.param(ZERO3, 1, 0, marks=pytest.mark.nightly),
        (ZERO3, 1, 1),
        pytest.param(TP2_PP2, 2, 0, marks=pytest.mark.nightly),
        pytest.param(TP2_PP2, 2, 1, marks=pytest.mark.nightly),
    ],
    ids=["zero3", "zero3 copies", "tp2 pp2", "tp2 pp2 copies"],
)
def test_two_hosts_hold_the_checkpoint_together(
    fleet: Fleet, prepare: Prepare, topology: tuple[str, ...], ranks_per_host: int, copies: int
) -> None:
    whole = prepare(fleet, topology, copies=copies, ranks_per_host=ranks_per_host)
    shared = tensor_files(whole / "checkpoints/iter_0000004")
    paths = [fleet.iteration(disk, 4) for disk in (0, 1)]
    for path in paths:
        assert open_checkpoint(path, Files()).is_whole == bool(copies)
        assert (tensor_files(path) == shared) == bool(copies)
    assert union(paths) == shared
    again = fleet.train([0, 1], [*topology, *LOCAL, f"checkpoint.local.copies={copies}"], ranks_per_host=ranks_per_host)
    assert again.ok, again.text
    # Without copies the second stage takes the tied table from the host of the first.
    expected = "72 % local, 28 % from host0" if topology == TP2_PP2 and not copies else "100 % local"
    assert f"loaded iteration 4: {expected}" in again.outputs[0]
    assert curve(fleet.run) == curve(whole)


@pytest.mark.parametrize("copies", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_hosts_that_are_swapped_take_the_bytes_of_each_other(fleet: Fleet, prepare: Prepare, copies: int) -> None:
    whole = prepare(fleet, ZERO3, copies=copies)
    again = fleet.train([1, 0], [*ZERO3, *LOCAL])
    assert again.ok, again.text
    expected = "100 % local, 0 % shared" if copies else "0 % local, 50 % from host0, 50 % from host1, 0 % shared"
    assert f"loaded iteration 4: {expected}" in again.outputs[0].replace("<1 %", "0 %")
    assert curve(fleet.run) == curve(whole)


def test_a_wiped_disk_is_filled_from_the_copy(fleet: Fleet, tmp_path: Path, prepare: Prepare) -> None:
    whole = prepare(fleet, ZERO3, copies=1)
    for wiped in ([2, 1], [1, 3]):
        shutil.copytree(fleet.disk(1), tmp_path / "kept")
        again = fleet.train(wiped, [*ZERO3, *LOCAL, "train.exit_interval=4"])
        assert again.ok, again.text
        shutil.rmtree(fleet.disk(1))
        (tmp_path / "kept").rename(fleet.disk(1))
    again = fleet.train([4, 1], [*ZERO3, *LOCAL])
    assert again.ok, again.text
    assert "loaded iteration 4: 50 % local, 50 % from host1, 0 % shared" in again.outputs[0]
    assert curve(fleet.run) == curve(whole)
    assert tensor_files(fleet.iteration(4, 6)) == tensor_files(whole / "checkpoints/iter_0000006")


def test_a_wiped_disk_without_copies_is_refused_by_name(fleet: Fleet, prepare: Prepare) -> None:
    prepare(fleet, ZERO3, copies=0)
    again = fleet.train([0, 2], [*ZERO3, *LOCAL])
    assert again.statuses == (1, 1), again.text
    for output in again.outputs:
        assert "No local checkpoint is whole" in output
        assert "pieces of host host1 (" in output


def test_a_wiped_disk_sends_the_run_back_to_the_shared_folder(fleet: Fleet, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run_ok(whole, [*BASE, *ZERO3, "checkpoint.save_interval=2"], ranks=2)
    overrides = [*ZERO3, "checkpoint.local.save_interval=1", "checkpoint.save_interval=2", "checkpoint.local.copies=0"]
    first = fleet.train([0, 1], [*overrides, "train.exit_interval=3", "checkpoint.local.flush_on_exit=false"])
    assert first.ok, first.text
    assert [path.name for path in sorted((fleet.run / "checkpoints").glob("iter_*"))] == ["iter_0000002"]
    again = fleet.train([0, 2], overrides)
    assert again.ok, again.text
    assert "local iteration 3 is not whole: missing are" in again.outputs[0]
    assert curve(fleet.run) == curve(whole)
    assert tensor_files(fleet.run / "checkpoints/iter_0000006") == tensor_files(whole / "checkpoints/iter_0000006")


@pytest.mark.parametrize("disks", [[0], pytest.param([1], marks=pytest.mark.nightly), [1, 2, 0]])
def test_another_number_of_hosts_resumes(fleet: Fleet, prepare: Prepare, disks: list[int]) -> None:
    whole = prepare(fleet, ZERO3, copies=1)
    again = fleet.train(disks, [*ZERO3, *LOCAL, "checkpoint.reshard=true"])
    assert again.ok, again.text
    assert "loaded iteration 4:" in again.outputs[0]
    ours, theirs = ([float.fromhex(row[1]) for row in curve(run)] for run in (fleet.run, whole))
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("copies", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_flipped_bytes_are_read_from_elsewhere(fleet: Fleet, prepare: Prepare, copies: int) -> None:
    whole = prepare(fleet, ZERO3, copies=copies)
    path = fleet.iteration(1, 4)
    checkpoint = open_checkpoint(path, Files())
    assert checkpoint.host is not None
    block = next(blocks_of(checkpoint, read_places(checkpoint), checkpoint.host.own))
    start, _, _ = next(block.packed.spans(block.lo, block.hi))
    with (path / block.place.file).open("r+b") as file:
        file.seek(block.place.offset + start)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    again = fleet.train([0, 1], [*ZERO3, *LOCAL])
    assert f"{fleet.mount}/iter_0000004 on this host is damaged: 1 of" in again.text
    if copies:
        assert again.ok, again.text
        assert "loaded iteration 4:" in again.outputs[0]
    else:
        assert again.ok, again.text
        assert "loaded iteration 2:" in again.outputs[0]
    assert curve(fleet.run) == curve(whole)


def damage(path: Path, kind: str) -> None:
    """Damage what is the same on every host."""
    if kind == "a truncated file":
        file = path / "model.safetensors"
        os.truncate(file, file.stat().st_size // 2)
        return
    file = path / ("model.safetensors" if kind == "a header" else kind)
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "kind",
    [
        "manifest.json",
        pytest.param("trainer_state.json", marks=pytest.mark.nightly),
        pytest.param("a header", marks=pytest.mark.nightly),
        "a truncated file",
    ],
)
def test_damaged_json_and_headers_come_from_another_host(fleet: Fleet, prepare: Prepare, kind: str) -> None:
    whole = prepare(fleet, ZERO3, copies=1)
    damage(fleet.iteration(1, 4), kind)
    again = fleet.train([0, 1], [*ZERO3, *LOCAL])
    assert again.ok, again.text
    assert "loaded iteration 4:" in again.outputs[0]
    if kind != "a truncated file":  # of which only what the ranks of this host read is fetched
        assert tensor_files(fleet.iteration(1, 4)) == tensor_files(whole / "checkpoints/iter_0000004")
    for name in ("manifest.json", "trainer_state.json"):
        assert (fleet.iteration(1, 4) / name).read_bytes() == (fleet.iteration(0, 4) / name).read_bytes()
    assert curve(fleet.run) == curve(whole)


def test_hosts_that_are_killed_and_swapped_resume(fleet: Fleet, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run_ok(whole, [*BASE, *ZERO3], ranks=2)
    mounts = {host: [Mount(fleet.mount, fleet.disk(host))] for host in (0, 1)}
    arguments = [f"run.dir={fleet.run}", f"checkpoint.local.dir={fleet.mount}", *BASE, *ZERO3, *EACH]
    gate = Gate(str(tmp_path / "gate"), "step", 4, (0, 1))
    Path(gate.folder).mkdir()
    function = on_hosts(train_with_gate, mounts)
    with started(function, [describe([gate]), *arguments], folder=fleet.run, ranks=2) as running:
        gate.await_reached()
        for rank in (0, 1):
            running.send(rank, signal.SIGKILL)
    again = fleet.train([1, 0], [*ZERO3, *EACH])
    assert again.ok, again.text
    assert re.search("loaded iteration [23]:", again.outputs[0])
    assert curve(fleet.run) == curve(whole)


def train_on_a_full_disk(arguments: list[str]) -> None:
    """Run the trainer; rank 1's disk says that it is full."""
    if os.environ["RANK"] == "1":
        Files.free_bytes = lambda *_: 10  # type: ignore[method-assign, assignment]
    run_trainer(arguments)


def test_a_full_disk_at_a_fetch_costs_no_checkpoint(fleet: Fleet, prepare: Prepare) -> None:
    whole = prepare(fleet, ZERO3, copies=0)
    ended = fleet.train([1, 0], [*ZERO3, *LOCAL], function=train_on_a_full_disk)
    assert ended.statuses == (1, 1), ended.text
    for output in ended.outputs:
        assert "A local checkpoint cannot be completed on this host (host host1, " in output
        assert "B free, found 10 B free" in output
    again = fleet.train([1, 0], [*ZERO3, *LOCAL])
    assert again.ok, again.text
    assert "loaded iteration 4:" in again.outputs[0]
    assert curve(fleet.run) == curve(whole)


def test_a_finished_run_started_again_saves_nothing(fleet: Fleet) -> None:
    overrides = [*ZERO3, "checkpoint.local.save_interval=2", "checkpoint.save_interval=4"]
    for _ in range(2):
        ended = fleet.train([0, 1], overrides)
        assert ended.ok, ended.text
        names = sorted(path.name for path in (fleet.run / "checkpoints").glob("iter_*"))
        assert names == ["iter_0000004", "iter_0000006"]


def test_another_model_is_refused_by_its_differences(fleet: Fleet, prepare: Prepare) -> None:
    prepare(fleet, ZERO3, copies=0)
    again = fleet.train([0, 1], [*ZERO3, *LOCAL, "model.n_layer=3"])
    assert again.statuses == (1, 1), again.text
    assert "MismatchError: This command differs from the run that it resumes" in again.outputs[0]
    assert "model.n_layer" in again.outputs[0]


KEPT = (*ZERO3, *EACH, "checkpoint.local.keep=6")
OTHER_DROPOUT = ("model.dropout=0.2", "checkpoint.override_dropout=true")


@pytest.fixture(scope="module")
def rewound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run in one folder that went back from iteration 4 to 2 and on with another dropout."""
    run = tmp_path_factory.mktemp("rewound") / "run"
    run_ok(run, [*BASE, *ZERO3, "checkpoint.save_interval=1", "train.exit_interval=4"], ranks=2)
    run_ok(run, [*BASE, *ZERO3, "checkpoint.save_interval=1", "checkpoint.ckpt_step=2", *OTHER_DROPOUT], ranks=2)
    return run


@pytest.mark.parametrize(
    ("disks", "shares_run"),
    [
        ([0, 1], True),
        pytest.param([1, 0], False, marks=pytest.mark.nightly),
        pytest.param([1, 2], True, marks=pytest.mark.nightly),
    ],
    ids=["shared run folder", "run folders of hosts", "only the copy"],
)
def test_an_abandoned_branch_does_not_return_with_its_host(
    fleet: Fleet, rewound: Path, disks: list[int], shares_run: bool
) -> None:
    for last in (2, 4):  # the end of a launch waits for the copies
        ended = fleet.train([0, 1], [*KEPT, f"train.exit_interval={last}"], shares_run=shares_run)
        assert ended.ok, ended.text
    back = [*KEPT, "checkpoint.ckpt_step=2", *OTHER_DROPOUT, "train.exit_interval=3"]
    ended = fleet.train([0, 2], back, shares_run=shares_run)
    assert ended.ok, ended.text
    assert "loaded iteration 2:" in ended.outputs[0]
    ended = fleet.train(disks, [*KEPT, *OTHER_DROPOUT], shares_run=shares_run)
    assert ended.ok, ended.text
    name = f"host{disks.index(1)}"
    assert f"local iterations of branches that the run has given up, on host {name}: 3, 4" in ended.outputs[0]
    assert "loaded iteration 3:" in ended.outputs[0]
    assert tensor_files(fleet.iteration(1, 6)) == tensor_files(rewound / "checkpoints/iter_0000006")


def die_before_the_rename(arguments: list[str]) -> None:
    """Run the trainer; rank 1 dies when it is to rename what a rewind leaves behind."""
    if os.environ["RANK"] == "1":
        CheckpointFolder.supersede = lambda *_: os._exit(9)  # type: ignore[method-assign, assignment]
    run_trainer(arguments)


@pytest.mark.nightly
def test_a_rewind_that_is_killed_half_way_is_a_rewind(fleet: Fleet, rewound: Path) -> None:
    ended = fleet.train([0, 1], [*KEPT, "train.exit_interval=4"])
    assert ended.ok, ended.text
    ended = fleet.train([0, 1], [*KEPT, "checkpoint.ckpt_step=2"], function=die_before_the_rename)
    assert not ended.ok
    assert fleet.iteration(1, 4).is_dir()
    ended = fleet.train([0, 1], [*KEPT, *OTHER_DROPOUT])
    assert ended.ok, ended.text
    assert "loaded iteration 2:" in ended.outputs[0]
    assert tensor_files(fleet.iteration(1, 6)) == tensor_files(rewound / "checkpoints/iter_0000006")


def test_the_local_folder_of_another_run_on_one_host_is_named(fleet: Fleet) -> None:
    ended = fleet.train([0, 1], [*KEPT, "train.exit_interval=2"])
    assert ended.ok, ended.text
    before = all_files(fleet.disk(1))
    fleet.run = fleet.run.parent / "other"
    refused = fleet.train([2, 1], [*KEPT, "train.exit_interval=2"])
    assert refused.statuses == (1, 1), refused.text
    for output in refused.outputs:
        assert "A folder of local checkpoints belongs to another run" in output
        assert "on host host1 those of run " in output
    assert all_files(fleet.disk(1)) == before
