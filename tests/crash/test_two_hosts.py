"""Two hosts, each a network namespace of its own with one rank, that lose sight of each other in a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from reprise.files import Files
from reprise.reading import open_checkpoint
from tests.crash.hosts import FIRST_HOST, Link, Mount
from tests.crash.moments import Gate, await_true, describe, train_with_gate
from tests.harness import TINY, Ended, all_files, call_on_ranks, curve, run_ok, started, tensor_files

pytestmark = pytest.mark.slow
SOAK = pytest.mark.nightly

_PREFIX = f"reprise{os.getpid()}"
TIMEOUT_S = 8.0
# A rank may wait for its own collective, for the other's answer and for a save that is under way.
BOUND_S = 2 * TIMEOUT_S + 200.0
ITERATIONS = 6
BASE = (
    "model=gpt2_tiny",
    *TINY,
    f"train.train_iters={ITERATIONS}",
    "model.dropout=0.1",
    "checkpoint.save_interval=2",
    "checkpoint.commit_timeout_s=60",
    f"train.distributed_timeout_minutes={TIMEOUT_S / 60}",
)
LONGER = ("train.train_iters=10", "parallel.zero_stage=3")
SWITCH = "switch"
LAST = f"checkpoints/iter_{ITERATIONS:07d}"


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


def train_on_host_with_disk(arguments: list[str]) -> None:
    """Move this rank to its host, mount the disk that is named for it, then run the trainer's command with gates."""
    mounted, *disks = map(Path, json.loads(arguments[0]))
    link = json.loads(arguments[1])
    Link(tuple(link["hosts"]), link["switch"]).enter()
    Mount(mounted, disks[int(os.environ["RANK"])]).make()
    train_with_gate(arguments[2:])


def train_on_host(arguments: list[str]) -> None:
    """Move this rank to its host, then run the trainer's command with gates."""
    link = json.loads(arguments[0])
    Link(tuple(link["hosts"]), link["switch"]).enter()
    train_with_gate(arguments[1:])


def arguments_on(link: Link, gates: Sequence[Gate], run: Path, overrides: Sequence[str]) -> list[str]:
    return [json.dumps(asdict(link)), describe(gates), f"run.dir={run}", *overrides]


def cut_in(
    run: Path, link: Link, gate: Gate, overrides: Sequence[str], *, at: str = SWITCH, saved: Path | None = None
) -> Ended:
    """Train until both ranks stand at the gate, cut the link, let them go on, return how they ended; mend the link.

    Args:
        saved: a checkpoint that must be there by then: it is written in the background.
    """
    Path(gate.folder).mkdir()
    arguments = arguments_on(link, [gate], run, overrides)
    with started(train_on_host, arguments, folder=run, ranks=2) as running:
        gate.await_reached()
        await_true(lambda: saved is None or saved.exists())
        link.set("down", at=at)
        gate.open()
        running.join(BOUND_S)
    link.set("up", at=at)
    return running.ended()


@pytest.mark.parametrize(
    ("topology", "at"),
    [
        ("parallel.zero_stage=3", SWITCH),
        pytest.param("parallel.pipeline_model_parallel_size=2", FIRST_HOST, marks=SOAK),
    ],
)
def test_both_sides_of_a_cut_link_end_and_the_job_resumes(link: Link, tmp_path: Path, topology: str, at: str) -> None:
    whole, run, overrides = tmp_path / "whole", tmp_path / "run", [*BASE, topology]
    run_ok(whole, overrides, ranks=2)
    gate = Gate(str(tmp_path / "gate"), "step", 4, (0, 1))
    committed = run / "checkpoints/iter_0000002"
    ended = cut_in(run, link, gate, overrides, at=at, saved=committed)
    assert ended.statuses == (1, 1), ended.text
    assert "rank 1" in ended.outputs[0].lower(), ended.text
    assert "rank 0" in ended.outputs[1].lower(), ended.text
    before = all_files(committed)
    again = call_on_ranks(train_on_host, arguments_on(link, [], run, overrides), folder=run, ranks=2)
    assert again.ok, again.text
    assert "iteration 2 from" in again.outputs[0]
    assert all_files(committed) == before
    assert curve(run) == curve(whole)
    assert tensor_files(run / LAST) == tensor_files(whole / LAST)


def test_a_link_that_is_cut_in_a_save_costs_that_save_only(link: Link, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_ok(whole, BASE, ranks=2)
    gate = Gate(str(tmp_path / "gate"), "save", 4, (0, 1))
    ended = cut_in(run, link, gate, BASE)
    assert ended.statuses == (1, 1), ended.text
    assert sorted(path.name for path in (run / "checkpoints").glob("iter_*")) == ["iter_0000002"]
    again = call_on_ranks(train_on_host, arguments_on(link, [], run, BASE), folder=run, ranks=2)
    assert again.ok, again.text
    assert curve(run) == curve(whole)
    assert tensor_files(run / LAST) == tensor_files(whole / LAST)


def is_whole(path: Path) -> bool:
    """Return whether all pieces of a checkpoint lie in a folder."""
    return path.exists() and open_checkpoint(path, Files()).is_whole


# The first copy opens the links; a later one finds them open.
@pytest.mark.parametrize(
    ("moment", "iteration"), [pytest.param("link", 2, marks=SOAK), ("copy", 2), pytest.param("copy", 4, marks=SOAK)]
)
def test_a_link_cut_in_a_copy_costs_that_copy_only(link: Link, tmp_path: Path, moment: str, iteration: int) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    # The cut copy waits for as long as a save may take.
    overrides = [*BASE, "train.distributed_timeout_minutes=2", "checkpoint.commit_timeout_s=20", *LONGER]
    run_ok(whole, overrides, ranks=2)
    folders = [tmp_path / name for name in ("mounted", "disk0", "disk1", "before", "copying", "training")]
    for folder in folders:
        folder.mkdir()
    mounted, *disks, before, copying, training = folders
    gates = [
        Gate(str(before), "step", iteration, (0, 1)),
        Gate(str(copying), moment, iteration, (0, 1)),
        Gate(str(training), "step", iteration + 2, (0, 1)),
    ]
    local = ["checkpoint.save=null", f"checkpoint.local.dir={mounted}", "checkpoint.local.save_interval=2"]
    arguments = [
        json.dumps([str(folder) for folder in (mounted, *disks)]),
        *arguments_on(link, gates, run, [*overrides, *local, "checkpoint.local.keep=9"]),
    ]
    with started(train_on_host_with_disk, arguments, folder=run, ranks=2) as running:
        gates[0].await_reached()
        earlier = [disk / f"iter_{iteration - 2:07d}" for disk in disks if iteration > 2]
        await_true(lambda: all(is_whole(path) for path in earlier))
        gates[0].open()
        for gate in gates[1:]:  # training has gone on while the copy stands still
            gate.await_reached()
        link.set("down", at=SWITCH)
        gates[1].open()
        line = f"iteration {iteration} is not copied: "
        # A side that opens a link looks for the run's store on the first host, for as long as it is cut off.
        knowing = running.outputs if moment == "copy" else running.outputs[:1]
        await_true(lambda: all(line in output.read_text() for output in knowing))
        link.set("up", at=SWITCH)
        both_ways = 2
        await_true(lambda: all(output.read_text().count(line) == both_ways for output in running.outputs))
        gates[2].open()
        running.join(BOUND_S)
    ended = running.ended()
    assert ended.ok, ended.text
    assert curve(run) == curve(whole)
    for disk in disks:
        parts = {path.name: is_whole(path) for path in disk.glob("iter_*")}
        assert sorted(parts) == [f"iter_{number:07d}" for number in (2, 4, 6, 8, 10)]
        assert not parts[f"iter_{iteration:07d}"]
        assert parts[f"iter_{iteration + 2:07d}"]  # one after that is not copied while this one still is
        assert parts["iter_0000010"]
