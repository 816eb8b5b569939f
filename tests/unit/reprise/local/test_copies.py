"""Copies between two hosts: made after a commit, skipped while one is under way, begun anew after a failure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from reprise.commit.attempt import Attempt, Hosts
from reprise.commit.channel import StoreChannel, single_rank_channel
from reprise.format.host_file import without
from reprise.format.layout import Layout
from reprise.loading.blocks import PieceBlock, blocks_of
from reprise.loading.reader import Bytes, open_checkpoint, read_places
from reprise.local import link
from reprise.local.copies import Copies
from reprise.local.pieces import PieceReader, damaged_pieces
from reprise.local_checkpointer import LocalCheckpointer, LocalPolicy
from reprise.policy import SavePolicy
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder, iteration_of
from tests import local_folders
from tests.fakes import all_ranks, run_ranks, tcp_store
from tests.unit.reprise.commit.test_protocol import contents

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
        return list(json.loads(found.status(6)))

    outcomes = run_ranks(2, fail, store=tcp_store)
    assert outcomes == [[False, True, []], [False, True, []]]
    assert "iteration 4 is not copied: A folder is not a checkpoint" in caplog.text
    assert json.loads(copies().decide([json.dumps(found).encode() for found in outcomes]))[:2] == [True, 2]


# Two hosts that save, each a thread with a folder of its own.

Spoil = Callable[[Path, int], None]


class SpoilingFiles(Files):
    """Files of a host that `spoil` checkpoints once they are committed."""

    def __init__(self, spoil: Spoil) -> None:
        self._spoil = spoil

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        iteration = iteration_of(target)
        if iteration is not None:
            self._spoil(target, iteration)


def save_on_two_hosts(root: Path, iterations: Sequence[int], *, spoil: Spoil, timeout_s: float = 10.0) -> None:
    """Save iterations on two hosts, each copied before the next is saved; `spoil` gets those of the second host."""

    def call(channel: StoreChannel) -> None:
        policy = SavePolicy(None, commit_timeout_s=timeout_s)
        files = SpoilingFiles(spoil) if channel.rank == 1 else Files()
        local = LocalPolicy(root / str(channel.rank), 1, keep=0, copies=1, saving=policy)
        checkpointer = LocalCheckpointer(local, channel, nonce="n", local_ranks=[channel.rank], files=files)
        checkpointer.start()
        for iteration in iterations:
            report = checkpointer.saver.save(iteration, contents(channel.rank, iteration))
            assert report is not None
            assert report.error is None, str(report.error)
            checkpointer.await_copies()
            channel.agree(f"{iteration} is copied or not", None)
        checkpointer.close()

    all_ranks(2, call, store=tcp_store)


def lacks(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the pieces that a folder does not count as there; those that it counts have the right bytes."""
    checkpoint = open_checkpoint(path, Files())
    assert checkpoint.host is not None
    assert damaged_pieces(checkpoint, read_places(checkpoint), checkpoint.host.held) == {}
    return without(checkpoint.host.written_by(1), checkpoint.host.held)


def flip_own_piece(path: Path) -> None:
    """Flip a bit of a piece that a host has written."""
    checkpoint = open_checkpoint(path, Files())
    assert checkpoint.host is not None
    block = next(blocks_of(checkpoint, read_places(checkpoint), checkpoint.host.own))
    start, _, _ = next(block.packed.spans(block.lo, block.hi))
    with (path / block.place.file).open("r+b") as file:
        file.seek(block.place.offset + start)
        byte = file.read(1)[0] ^ 1
        file.seek(-1, 1)
        file.write(bytes([byte]))


@pytest.fixture
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.usefixtures("on_loopback")
def test_an_iteration_saved_again_is_no_copied_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an evaluation that was interrupted; the host is lost before the new checkpoint is copied."""
    folders = local_folders.save_on_two_hosts(tmp_path, 3, 4, copies=1, keep=1)

    def save_again(local: LocalCheckpointer, rank: int) -> None:
        local.saver.outdated(4)
        local.saver.save(4, local_folders.contents(rank, 4))

    with monkeypatch.context() as patch:
        patch.setattr(Copies, "_guarded", lambda *_: lambda: None)
        assert local_folders.load_on_hosts(folders, then=save_again) == 4
    shutil.rmtree(folders[1])
    assert local_folders.load_on_hosts(folders) == 3


@pytest.mark.usefixtures("on_loopback")
def test_flipped_bytes_on_the_senders_disk_are_not_held(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def spoil(path: Path, iteration: int) -> None:
        if iteration == 1:
            flip_own_piece(path)

    save_on_two_hosts(tmp_path, (1, 2), spoil=spoil)
    assert "iteration 1 arrived damaged and is not fully copied: model.safetensors, tensor w, bytes [0," in caplog.text
    assert lacks(tmp_path / "0/iter_0000001") == {"w": (1,)}
    assert lacks(tmp_path / "0/iter_0000002") == {}
    assert lacks(tmp_path / "1/iter_0000002") == {}


class TroubledReader(PieceReader):
    """What the sender reads; blocks of the second host's first checkpoint meet `deed` on their way."""

    deed: Callable[[Bytes], None]

    def read(self, blocks: Iterator[PieceBlock], buffer: Bytes) -> Iterator[tuple[PieceBlock, Bytes]]:
        for block, data in super().read(blocks, buffer):
            if self._checkpoint.iteration == 1 and self._checkpoint.path.parent.name == "1":
                self.deed(data)
            yield block, data


@pytest.mark.usefixtures("on_loopback")
def test_flipped_bytes_in_flight_are_not_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(_: object, data: Bytes) -> None:
        data[-1] ^= 1

    monkeypatch.setattr(TroubledReader, "deed", flip, raising=False)
    monkeypatch.setattr(link, "PieceReader", TroubledReader)
    save_on_two_hosts(tmp_path, (1, 2), spoil=lambda *_: None)
    assert "iteration 1 arrived damaged and is not fully copied" in caplog.text
    assert lacks(tmp_path / "0/iter_0000001") == {"w": (1,)}
    assert lacks(tmp_path / "0/iter_0000002") == {}


@pytest.mark.usefixtures("on_loopback")
def test_a_link_that_breaks_in_a_copy_is_replaced_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reset(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(TroubledReader, "deed", reset, raising=False)
    monkeypatch.setattr(link, "PieceReader", TroubledReader)
    save_on_two_hosts(tmp_path, (1, 2), spoil=lambda *_: None, timeout_s=1.5)
    assert "iteration 1 is not copied: A link between two hosts failed" in caplog.text
    assert "found Connection reset by peer. The next save copies again" in caplog.text
    assert lacks(tmp_path / "0/iter_0000001") == {"w": (1,)}
    assert lacks(tmp_path / "0/iter_0000002") == {}
