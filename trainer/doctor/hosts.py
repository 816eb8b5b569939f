"""Checks whether a launch's hosts share a folder."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from reprise.errors import count_of
from reprise.ranks import StoreChannel
from reprise.storage import why_unseen
from trainer.config.terms import WAY_OUT
from trainer.doctor.looks import BAD, FINE, Finding, scratch_folder


def one_folder(path: Path, channel: StoreChannel) -> Finding:
    """Check whether every rank sees a folder that rank 0 makes in a folder. Call on all ranks.

    Returns:
        On rank 0, the finding.

    Raises:
        TrainerError: A rank exits.
    """
    what, mark = "one folder for all hosts", ""
    with ExitStack() as stack:
        if channel.rank == 0:
            with suppress(OSError):  # its own checks have named it
                mark = str(stack.enter_context(scratch_folder(path)))
        mark = channel.broadcast("doctor/made", mark.encode()).decode()
        reason = why_unseen(Path(mark), os.stat) if mark else "there is none"
        answer = json.dumps([socket.gethostname(), reason]).encode()
        answers = [json.loads(row) for row in channel.gather("doctor/unseen", answer)]
    if problems := {name: reason for name, reason in answers if reason}:
        reasons = "; ".join(f"host {name}: {reason}" for name, reason in problems.items())
        fix = f"Mount the same file system at this path on every host. {WAY_OUT}"
        return Finding(what, BAD, f"{mark or path} of rank 0 cannot be seen by {reasons}. {fix}")
    return Finding(what, FINE, f"{count_of(len(answers), 'rank')} on {count_of(len(dict(answers)), 'host')}")
