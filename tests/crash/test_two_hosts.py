"""Two hosts, each a network namespace of its own with one rank, that lose sight of each other in a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from reprise.loading import open_checkpoint
from reprise.storage import Files, iteration_name
from tests.crash.hosts import FIRST_HOST, Link, Mount
from tests.crash.moments import Gate, await_true, describe, train_with_gate
from tests.crash.outcomes import assert_ends_as
from tests.harness import TINY, all_files, call_on_ranks, checkpoint, curve, run_ok, started
from tests.profiles import nightly

pytestmark = pytest.mark.slow

_PREFIX = f"reprise{os.getpid()}"
TIMEOUT_S = 8.0
# A rank may wait for its own collective, for the other's answer and for a save that is under way.
BOUND_S = 2 * TIMEOUT_S + 200.0
BASE = (
    "model=gpt2_tiny",
    *TINY,
    "train.train_iters=6",
    "model.dropout=0.1",
    "checkpoint.save_interval=2",
    "checkpoint.commit_timeout_s=60",
    f"train.distributed_timeout_minutes={TIMEOUT_S / 60}",
)
LONGER = ("train.train_iters=10", "parallel.zero_stage=3")
SWITCH = "switch"


@pytest.fixture
def link() -> Iterator[Link]:
    found = Link((f"{_PREFIX}a", f"{_PREFIX}b"), f"{_PREFIX}s")
    try:
        try:
            found.make()
        except OSError as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        yield found
    finally:
        found.remove()


def train_on_host(arguments: list[str]) -> None:
    """Move this rank to its host, mount the disk that is named for it, if any, then run the trainer with gates."""
    link, places = json.loads(arguments[0]), json.loads(arguments[1])
    Link(tuple(link["hosts"]), link["switch"]).enter()
    if places:
        Mount(Path(places[0]), Path(places[1 + int(os.environ["RANK"])])).make()
    train_with_gate(arguments[2:])


def arguments_on(
    link: Link, gates: Sequence[Gate], run: Path, *overrides: str, disks: Sequence[Path] = ()
) -> list[str]:
    """Return the arguments of `train_on_host`; `disks` are where they are mounted, and the disk of each host."""
    places = json.dumps([str(path) for path in disks])
    return [json.dumps(asdict(link)), places, describe(gates), f"run.dir={run}", *BASE, *overrides]


@pytest.mark.parametrize(
    ("moment", "topology", "at"),
    [
        ("step", "parallel=zero3", SWITCH),
        nightly("step", "parallel=pp2", FIRST_HOST),
        nightly("save", "parallel=zero1", SWITCH),
    ],
)
def test_both_sides_of_a_cut_link_end_and_the_job_resumes(
    link: Link, tmp_path: Path, moment: str, topology: str, at: str
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_ok(whole, [*BASE, topology], ranks=2)
    gate = Gate.at(tmp_path / "gate", moment, 4, (0, 1))
    with started(train_on_host, arguments_on(link, [gate], run, topology), folder=run, ranks=2) as running:
        gate.await_reached()
        await_true(checkpoint(run, 2).exists)  # written in the background
        link.set("down", at=at)
        gate.open()
        running.join(BOUND_S)
    link.set("up", at=at)
    ended = running.ended()
    assert ended.statuses == (1, 1), ended.text
    if moment == "step":
        assert "rank 1" in ended.outputs[0].lower(), ended.text
        assert "rank 0" in ended.outputs[1].lower(), ended.text
    assert [path.name for path in (run / "checkpoints").glob("iter_*")] == ["iter_0000002"]
    before = all_files(checkpoint(run, 2))
    again = call_on_ranks(train_on_host, arguments_on(link, [], run, topology), folder=run, ranks=2)
    assert again.ok, again.text
    assert "iteration 2 from" in again.outputs[0]
    assert all_files(checkpoint(run, 2)) == before
    assert_ends_as(run, whole)


def is_whole(path: Path) -> bool:
    """Return whether all pieces of a checkpoint lie in a folder."""
    return path.exists() and open_checkpoint(path, Files()).is_whole


@pytest.mark.parametrize(("moment", "iteration"), [nightly("link", 2), ("copy", 2), nightly("copy", 4)])
def test_a_link_cut_in_a_copy_costs_that_copy_only(link: Link, tmp_path: Path, moment: str, iteration: int) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    # The cut copy waits for as long as a save may take.
    overrides = ["train.distributed_timeout_minutes=2", "checkpoint.commit_timeout_s=20", *LONGER]
    run_ok(whole, [*BASE, *overrides], ranks=2)
    mounted, *disks = folders = [tmp_path / name for name in ("mounted", "disk0", "disk1")]
    for folder in folders:
        folder.mkdir()
    moments = (("step", iteration), (moment, iteration), ("step", iteration + 2))
    gates = [Gate.at(tmp_path / f"gate{n}", *where, (0, 1)) for n, where in enumerate(moments)]
    local = ["checkpoint.save=null", f"checkpoint.local.dir={mounted}", "checkpoint.local.save_interval=2"]
    arguments = arguments_on(link, gates, run, *overrides, *local, "checkpoint.local.keep=9", disks=folders)
    with started(train_on_host, arguments, folder=run, ranks=2) as running:
        gates[0].await_reached()
        earlier = [disk / iteration_name(iteration - 2) for disk in disks if iteration > 2]
        await_true(lambda: all(is_whole(path) for path in earlier))
        gates[0].open()
        for gate in gates[1:]:  # training has gone on while the copy stands still
            gate.await_reached()
        link.set("down", at=SWITCH)
        gates[1].open()
        line = f"iteration {iteration} was not copied: "
        # A side that opens a link looks for the run's store on the first host, for as long as it is cut off.
        knowing = running.outputs if moment == "copy" else running.outputs[:1]
        await_true(lambda: all(line in output.read_text() for output in knowing))
        link.set("up", at=SWITCH)
        await_true(lambda: all(line in output.read_text() for output in running.outputs))
        gates[2].open()
        running.join(BOUND_S)
    ended = running.ended()
    assert ended.ok, ended.text
    assert curve(run) == curve(whole)
    for disk in disks:
        parts = {int(path.name[5:]): is_whole(path) for path in disk.glob("iter_*")}
        assert sorted(parts) == [2, 4, 6, 8, 10]
        assert not parts[iteration]
        assert parts[iteration + 2]  # one after that is not copied while this one still is
        assert parts[10]
