"""A run's journal, `run.json`: its lineage, and the newest iteration saved for a resume.

Each start and each commit writes it. A local checkpoint folder has a journal without saves.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from reprise.errors import CheckpointError, MismatchError, TrainerError
from reprise.format import Journal, Lineage
from reprise.storage import (
    FILE_SYSTEM,
    Json,
    atomic_output,
    cannot_write,
    failed_read,
    is_damage,
    is_file,
    matching,
    read_regular,
)
from trainer.config.terms import RUN

_log = logging.getLogger(__name__)

RUN_FILE = "run.json"
_noting = threading.Lock()  # several save targets commit on their own threads


def read_journal(path: Path) -> Journal:
    """Return the journal in a `run.json`. It is empty if the file is missing, or damaged, which is logged.

    Raises:
        UnreadableError: The file cannot be read at the moment.
    """
    try:
        return Journal.from_bytes(read_regular(path), where=path)
    except OSError as error:
        if not is_damage(error):
            raise failed_read("The record of a run cannot be read", error, where=path) from error
    except MismatchError:
        raise
    except CheckpointError as error:
        _log.error("%s It is rebuilt from the checkpoints", error)
    return Journal()


def write_journal(folder: Path, journal: Journal, another: str = RUN.another) -> None:
    """Write a `run.json` durably, unless it already has this content. Hosts with a shared folder may write at once."""
    path, data = folder / RUN_FILE, journal.to_bytes()
    try:
        if is_file(path) and path.read_bytes() == data:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_output(path, FILE_SYSTEM, replaces=True) as partial:
            FILE_SYSTEM.write_whole(partial, data)
    except OSError as error:
        raise cannot_write(path, error, what="The record of a run", another=another) from error


def note_saved(folder: Path, lineage: Json | None, iteration: int) -> None:
    """Record a commit, unless another job has continued the run. Any thread may call it. A failure is only logged.

    Args:
        lineage: The saving run's lineage, in JSON form.
    """
    try:
        with _noting:
            journal = read_journal(folder / RUN_FILE)
            if lineage is not None and not journal.lineage.branches:  # deleted or damaged meanwhile
                journal = Journal(Lineage.from_record(lineage))
            if journal.lineage.record() == lineage and (journal.saved is None or journal.saved < iteration):
                for path in matching(folder, f".{RUN_FILE}.*.partial"):  # a kill left it; no start is under way now
                    FILE_SYSTEM.remove(path)
                write_journal(folder, Journal(journal.lineage, iteration))
    except (OSError, TrainerError) as error:
        _log.error("%s", error)
