"""The actions of a commit: of one shared folder, and of a folder of each host."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from reprise.commit.attempt import Attempt, Copying, SharedCommitState
from reprise.commit.channel import single_rank_channel
from reprise.commit.commit_state import Action
from reprise.commit.file_exchange import FileExchange
from reprise.commit.hosts_commit import HostsCommit, LocalSaves
from reprise.commit.messages import Answer, DecisionMessage
from reprise.commit.piece_tables import PieceTables
from reprise.commit.protocol import Steps, TwoPhaseCommit
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec, build_layout
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder

SPEC = TensorSpec(TensorKind.MODEL, "w", (2,), StoredDtype.F32, (2,))
OF_HOSTS = {Action.ANSWER, Action.AWAIT_LEADERS}


def test_only_folders_of_hosts_have_the_actions_of_hosts(tmp_path: Path) -> None:
    layout = build_layout([SPEC], file_bytes=1 << 20)
    attempt = Attempt(7, "n-1", CheckpointFolder(tmp_path, Files()), layout)
    steps, local = cast("Steps", None), LocalSaves(FileExchange(), cast("Copying", None))
    arguments = (single_rank_channel(), attempt, SharedCommitState(0, [0]), steps, PieceTables())
    plain, of_hosts = TwoPhaseCommit(*arguments), HostsCommit(*arguments, local=local)
    assert set(of_hosts._calls()) == set(Action) - {Action.NOTHING, Action.END}
    assert set(plain._calls()) == set(of_hosts._calls()) - OF_HOSTS


@pytest.mark.parametrize(
    "message",
    [
        DecisionMessage(iteration=7, copies="[true, 2, null]"),
        DecisionMessage(problem="Rank 1: \udcff is no text"),
        DecisionMessage(witnesses=[0, 3]),
    ],
)
def test_a_decision_arrives_as_it_was(message: DecisionMessage) -> None:
    assert DecisionMessage.from_bytes(message.to_bytes()) == message


def test_an_answer_arrives_as_it_was() -> None:
    for answer in (Answer(None, "[1, 2]"), Answer("Input/output error", "")):
        assert Answer.from_bytes(answer.to_bytes()) == answer
