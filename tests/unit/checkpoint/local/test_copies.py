"""Copies between two hosts: made after a commit, skipped while one is under way, begun anew after a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes import run_ranks, tcp_store
from trainer.checkpoint.commit.attempt import Attempt
from trainer.checkpoint.commit.channel import StoreChannel, single_rank_channel
from trainer.checkpoint.commit.hosts import Hosts
from trainer.checkpoint.format.layout import Layout
from trainer.checkpoint.local.copies import Copies
from trainer.checkpoint.storage.files import Files
from trainer.checkpoint.storage.folder import CheckpointFolder

HOSTS = Hosts(("a", "b"), ((0,), (1,)))


def copies(channel: StoreChannel | None = None, *, count: int = 1, hosts: Hosts = HOSTS) -> Copies:
    return Copies(channel or single_rank_channel(), hosts, nonce="n", count=count, timeout_s=2.0)


def status(*, is_busy: bool = False, is_broken: bool = False, copied: tuple[int, ...] = ()) -> bytes:
    return json.dumps([is_busy, is_broken, copied]).encode()


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([status(), status()], [True, 1, None]),
        ([status(is_busy=True), status()], [False, 1, None]),
        ([status(), status(is_broken=True)], [True, 2, None]),
        ([status(copied=(2, 4, 6)), status(copied=(2, 4))], [True, 1, 4]),
    ],
    ids=["idle", "busy", "broken", "copied"],
)
def test_rank_0_decides_from_the_status_of_every_host(statuses: list[bytes], expected: list[object]) -> None:
    assert json.loads(copies().decide(statuses)) == expected


def test_one_host_and_no_copies_copy_nothing() -> None:
    for found in (copies(count=0), copies(hosts=Hosts(("a",), ((0, 1),)))):
        assert json.loads(found.decide([status()])) == [False, 1, None]


def test_what_is_not_copied_elsewhere_stays() -> None:
    found = copies()
    assert not found.pinned
    found.loaded(2)
    assert set(found.pinned) == {2}
    found.committed(None, json.dumps([False, 1, 4]).encode())  # type: ignore[arg-type]
    assert set(found.pinned) == {4}


def test_a_copy_that_fails_is_named_and_mended_by_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def attempt_in(rank: int) -> Attempt:
        folder = CheckpointFolder(tmp_path / str(rank), Files())
        return Attempt(4, "n-1", folder, Layout((), {}), HOSTS)

    def fail(channel: StoreChannel) -> list[object]:
        found = copies(channel)
        found.committed(attempt_in(channel.rank), json.dumps([True, 1, None]).encode())
        found.close()
        return list(json.loads(found.status()))

    outcomes = run_ranks(2, fail, store=tcp_store)
    assert outcomes == [[False, True, []], [False, True, []]]
    assert "iteration 4 is not copied: A folder is not a checkpoint" in caplog.text
    assert json.loads(copies().decide([json.dumps(found).encode() for found in outcomes]))[:2] == [True, 2]
