"""Copies between two hosts: made after a commit, skipped while one is under way, begun anew after a failure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from reprise.commit.attempt import Attempt, Hosts
from reprise.format.layout import Layout
from reprise.loading.blocks import PieceBlock
from reprise.loading.reader import Bytes, Checkpoint, open_checkpoint
from reprise.local import link
from reprise.local.copies import Copies
from reprise.local.local_checkpointer import LocalCheckpointer
from reprise.local.pieces import damaged_pieces, read_blocks
from reprise.ranks.channel import StoreChannel, single_rank_channel
from reprise.saving.policy import SavePolicy
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder
from tests import local_folders
from tests.fakes import all_ranks, run_ranks, tcp_store
from tests.unit.reprise.commit.test_protocol import contents

HOSTS = Hosts(("a", "b"), ((0,), (1,)))


def copies(channel: StoreChannel | None = None, *, count: int = 1, hosts: Hosts = HOSTS) -> Copies:
    return Copies(channel or single_rank_channel(), hosts, nonce="n", count=count, timeout_s=2.0)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ([False, []], [True, None]),
        ([True, []], [False, None]),  # busy
        ([False, [2, 4]], [True, 4]),
    ],
)
def test_rank_0_decides_from_the_status_of_every_host(status: list[object], expected: list[object]) -> None:
    statuses = [json.dumps(each).encode() for each in ([False, [2, 4, 6]], status)]
    assert json.loads(copies().decide(statuses)) == expected
    for other in (copies(count=0), copies(hosts=Hosts(("a",), ((0, 1),)))):  # which copy nothing
        assert json.loads(other.decide(statuses))[0] is False


def test_what_is_not_copied_elsewhere_stays() -> None:
    found = copies()
    assert not found.pinned
    found.loaded(2)
    found.committed(None, found.decide([b"[true, []]"]))  # type: ignore[arg-type] - nothing is copied everywhere yet
    assert set(found.pinned) == {2}
    found.committed(None, json.dumps([False, 4]).encode())  # type: ignore[arg-type]
    assert set(found.pinned) == {4}
    found._current = 6
    assert set(found.pinned) == {4, 6}
    found.found([2, 4, 6])
    found.rewound(4)
    assert json.loads(found.status(2))[1] == [4]


def test_a_copy_that_fails_is_named_and_mended_by_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def attempt_in(rank: int) -> Attempt:
        folder = CheckpointFolder(tmp_path / str(rank), Files())
        return Attempt(4, "n-1", folder, Layout((), 0, {}), HOSTS)

    def fail(channel: StoreChannel) -> list[object]:
        found = copies(channel)
        found.committed(attempt_in(channel.rank), json.dumps([True, None]).encode())
        found.close()
        return list(json.loads(found.status(6)))

    outcomes = run_ranks(2, fail, store=tcp_store)
    assert outcomes == [[False, []], [False, []]]
    assert "iteration 4 was not copied: A folder without manifest.json is not a checkpoint" in caplog.text
    assert json.loads(copies().decide([json.dumps(found).encode() for found in outcomes]))[0] is True


def test_an_iteration_saved_again_is_no_copied_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an evaluation that was interrupted; the host is lost before the new checkpoint is copied."""
    folders = local_folders.save_on_two_hosts(tmp_path, 3, 4, copies=1, keep=1)

    def save_again(local: LocalCheckpointer, rank: int) -> None:
        local.mark_outdated(4)
        local.save(4, local_folders.contents(rank, 4))

    with monkeypatch.context() as patch:
        patch.setattr(Copies, "_copy", lambda *_: None)
        assert local_folders.load_on_hosts(folders, then=save_again) == 4
    shutil.rmtree(folders[1])
    assert local_folders.load_on_hosts(folders) == 3


def lacks(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the pieces that a folder does not count as there; those that it counts have the right bytes."""
    checkpoint = open_checkpoint(path, Files())
    assert checkpoint.host is not None
    assert damaged_pieces(checkpoint, checkpoint.host.held) == {}
    return checkpoint.host.by_host(checkpoint.host.missing).get(1, {})


def flip(data: Bytes) -> None:
    data[-1] ^= 1


def reset(*_: object) -> None:
    raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize(
    ("deed", "timeout_s"), [(None, 10.0), (flip, 10.0), (reset, 1.5)], ids=["disk", "flight", "link"]
)
def test_flipped_bytes_and_broken_links_are_named_and_not_held(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    deed: Callable[..., None] | None,
    timeout_s: float,
) -> None:
    """A piece of the second host's first checkpoint is damaged on its disk or on its way; the next is copied whole."""

    class SpoilingFiles(Files):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if target.name == "iter_0000001":
                local_folders.flip(target, of_host=1)

    def read(checkpoint: Checkpoint, blocks: Iterable[PieceBlock]) -> Iterator[tuple[PieceBlock, Bytes]]:
        for block, data in read_blocks(checkpoint, blocks):
            if deed and checkpoint.iteration == 1 and checkpoint.path.parent.name == "1":
                deed(data)
            yield block, data

    def call(channel: StoreChannel) -> None:
        files = SpoilingFiles() if channel.rank == 1 and deed is None else Files()
        policy = SavePolicy(tmp_path / str(channel.rank), commit_timeout_s=timeout_s)
        checkpointer = LocalCheckpointer(policy, channel, nonce="n", copies=1, local_ranks=[channel.rank], files=files)
        checkpointer.start()
        for iteration in (1, 2):
            report = checkpointer.save(iteration, contents(channel.rank, iteration))
            assert report is not None
            assert report.error is None, str(report.error)
            checkpointer.await_copies()
            channel.agree(f"{iteration} is copied or not", None)
        assert channel.rank or checkpointer._copies._copied == {2}
        checkpointer.close()

    monkeypatch.setattr(link, "read_blocks", read)
    all_ranks(2, call, store=tcp_store)
    assert "iteration 1 was not copied" in caplog.text
    assert deed is reset or "written by " in caplog.text
    assert lacks(tmp_path / "0/iter_0000001") == {"w": (1,)}
    assert lacks(tmp_path / "0/iter_0000002") == lacks(tmp_path / "1/iter_0000002") == {}


def test_a_copy_leaves_no_key_of_its_links(tmp_path: Path) -> None:
    def call(channel: StoreChannel) -> int:
        policy = SavePolicy(tmp_path / str(channel.rank))
        checkpointer = LocalCheckpointer(policy, channel, nonce="n", copies=1, local_ranks=[channel.rank])
        checkpointer.start()
        counts = list[int]()
        for iteration in (1, 2, 3):
            checkpointer.save(iteration, contents(channel.rank, iteration))
            checkpointer.await_copies()
            channel.agree(f"{iteration} is copied", None)
            counts.append(channel.store("", 1.0).num_keys())
            channel.agree(f"{iteration} is counted", None)
        assert channel.rank or checkpointer._copies._copied == {2, 3}
        checkpointer.close()
        return counts[2] - counts[1]

    assert max(all_ranks(2, call, store=tcp_store)) < 2 * 2  # of two links; a rank's message may be on its way
