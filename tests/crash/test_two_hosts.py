"""Two hosts, each a network namespace of its own with one rank, that lose sight of each other in a run."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.moments import Gate, await_true, describe, train_with_gate
from tests.harness import TINY, Ended, all_files, call_on_ranks, curve, run_ok, started, tensor_files

pytestmark = pytest.mark.slow

_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000  # linux/sched.h
_PREFIX = f"reprise{os.getpid()}"
TIMEOUT_S = 8.0
# A rank may wait for its own collective, for the other's answer and for a save that is under way.
BOUND_S = 2 * TIMEOUT_S + 30.0
ITERATIONS = 6
BASE = (
    "model=gpt2_tiny",
    *TINY,
    f"train.train_iters={ITERATIONS}",
    "model.dropout=0.1",
    "checkpoint.save_interval=2",
    "checkpoint.commit_timeout_s=3",
    f"train.distributed_timeout_minutes={TIMEOUT_S / 60}",
)
SWITCH, FIRST_HOST = "switch", "first host"
LAST = f"checkpoints/iter_{ITERATIONS:07d}"


def ip(*arguments: str) -> None:
    program = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise OSError("there is no `ip`")
    ended = subprocess.run([program, *arguments], capture_output=True, text=True)
    if ended.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {ended.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Link:
    """A switch between two hosts, each a namespace named by `host`, of which rank 0 lives on the first."""

    hosts: tuple[str, str]
    switch: str

    def make(self) -> None:
        """Make hosts, switch and cables.

        Raises:
            OSError: if this machine does not let us.
        """
        for name in (*self.hosts, self.switch):
            ip("netns", "add", name)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "link", "set", "switch", "up")
        for number, host in enumerate(self.hosts):
            port = f"port{number}"
            ip("-n", host, "link", "add", "net0", "type", "veth", "peer", "name", port, "netns", self.switch)
            ip("-n", host, "address", "add", f"{self.address(number)}/24", "dev", "net0")
            ip("-n", self.switch, "link", "set", port, "master", "switch", "up")
            for device in ("lo", "net0"):
                ip("-n", host, "link", "set", device, "up")

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def set(self, state: str, *, at: str) -> None:
        """Bring the link "up" or "down", at the SWITCH, as by a pulled cable, or at the FIRST_HOST's own device."""
        if at == FIRST_HOST:
            ip("-n", self.hosts[0], "link", "set", "net0", state)
            return
        for number in range(len(self.hosts)):
            ip("-n", self.switch, "link", "set", f"port{number}", state)

    def remove(self) -> None:
        """Remove what was made, as far as it was."""
        for name in (*self.hosts, self.switch):
            if Path("/var/run/netns", name).exists():
                ip("netns", "del", name)


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
    """Move this rank to its host, then run the trainer's command with gates."""
    told = json.loads(arguments[0])
    host = told["hosts"][int(os.environ["RANK"])]
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/var/run/netns/{host}", os.O_RDONLY)
    if (
        libc.setns(descriptor, _CLONE_NEWNET)
        or libc.unshare(_CLONE_NEWUTS)
        or libc.sethostname(host.encode(), len(host))
    ):
        raise OSError(ctypes.get_errno(), "a rank cannot move to its host")
    os.close(descriptor)
    os.environ |= {"MASTER_ADDR": told["address"], "GLOO_SOCKET_IFNAME": "net0", "LOCAL_RANK": "0"}
    train_with_gate(arguments[1:])


def on_hosts(link: Link, gates: Sequence[Gate], run: Path, overrides: Sequence[str]) -> list[str]:
    told = json.dumps({"hosts": link.hosts, "address": link.address(0)})
    return [told, describe(gates), f"run.dir={run}", *overrides]


def cut_in(
    run: Path, link: Link, gate: Gate, overrides: Sequence[str], *, at: str = SWITCH, saved: Path | None = None
) -> Ended:
    """Train until both ranks stand at the gate, cut the link, let them go on, return how they ended; mend the link.

    Args:
        saved: a checkpoint that must be there by then: it is written in the background.
    """
    Path(gate.folder).mkdir()
    arguments = on_hosts(link, [gate], run, overrides)
    with started(train_on_host, arguments, folder=run, ranks=2) as running:
        gate.await_reached()
        await_true(lambda: saved is None or saved.exists())
        link.set("down", at=at)
        gate.open()
        running.join(BOUND_S)
    link.set("up", at=at)
    return running.ended()


@pytest.mark.parametrize(
    ("topology", "at"), [("parallel.zero_stage=3", SWITCH), ("parallel.pipeline_model_parallel_size=2", FIRST_HOST)]
)
def test_both_sides_of_a_cut_link_end_and_the_healed_job_is_the_unbroken_one(
    link: Link, tmp_path: Path, topology: str, at: str
) -> None:
    whole, run, overrides = tmp_path / "whole", tmp_path / "run", [*BASE, topology]
    run_ok(whole, overrides, ranks=2)
    gate = Gate(str(tmp_path / "gate"), "step", 4, (0, 1))
    committed = run / "checkpoints/iter_0000002"
    ended = cut_in(run, link, gate, overrides, at=at, saved=committed)
    assert ended.statuses == (1, 1), ended.text
    assert "rank 1" in ended.outputs[0].lower(), ended.text
    assert "rank 0" in ended.outputs[1].lower(), ended.text
    before = all_files(committed)
    again = call_on_ranks(train_on_host, on_hosts(link, [], run, overrides), folder=run, ranks=2)
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
    again = call_on_ranks(train_on_host, on_hosts(link, [], run, BASE), folder=run, ranks=2)
    assert again.ok, again.text
    assert curve(run) == curve(whole)
    assert tensor_files(run / LAST) == tensor_files(whole / LAST)
