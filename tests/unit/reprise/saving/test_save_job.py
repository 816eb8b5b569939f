"""Saves of two hosts with a folder of their own each, one of which does not hear the decision."""

from __future__ import annotations

from pathlib import Path

from reprise.commit.attempt import Hosts
from reprise.format.host_file import attempt_of
from reprise.ranks.channel import StoreChannel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import Retention, SavePolicy
from reprise.storage.files import FILE_SYSTEM, Files
from tests.fakes import all_ranks
from tests.unit.reprise.commit.test_commit_state import NoCopies
from tests.unit.reprise.commit.test_protocol import Deaf, contents

HOSTS = Hosts(("a", "b"), ((0,), (1,)))


def saver(
    channel: StoreChannel, root: Path, nonce: str, *, deaf_to: str = "", files: Files = FILE_SYSTEM
) -> Checkpointer:
    """Return the started saver of a rank, which is a host of its own."""
    channel = (Deaf if deaf_to else StoreChannel)(channel._source, channel.rank, world_size=2, timeout_s=10.0)
    if isinstance(channel, Deaf):
        channel.attempt = deaf_to
    policy = SavePolicy(root / str(channel.rank), retention=Retention(1), commit_timeout_s=10.0)
    found = Checkpointer(policy, channel, nonce=nonce, hosts=HOSTS, copying=NoCopies(), files=files)
    found.start()
    return found


def test_a_prepared_folder_in_doubt_stays_until_it_is_completed(tmp_path: Path) -> None:
    def call(channel: StoreChannel) -> list[bool]:
        checkpointer = saver(channel, tmp_path, "n", deaf_to="n-2")
        failed = []
        # The run ends with a save of the iteration that rank 0 has committed, and the other host has not.
        for iteration in (1, 2, 2):
            report = checkpointer.save(iteration, contents(channel.rank, iteration))
            failed.append(report is not None and report.error is not None)
        checkpointer.close()
        return failed

    assert all_ranks(2, call) == [[False, False, False], [False, True, True]]
    assert attempt_of(tmp_path / "1/.iter_0000002.n-2.partial") == "n-2"

    def start(channel: StoreChannel) -> None:
        saver(channel, tmp_path, "m").close()

    all_ranks(2, start)
    assert [attempt_of(tmp_path / f"{host}/iter_0000002") for host in (0, 1)] == ["n-2", "n-2"]
    left = [path.name for path in tmp_path.rglob(".*")]
    assert left == []
