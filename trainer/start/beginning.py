"""The record of where a launch began, by which a restart of it resumes instead of beginning again."""

from __future__ import annotations

import json

from reprise.errors import TrainerError
from reprise.files import Files, cannot_write
from reprise.folder import CheckpointFolder
from trainer.config.derived import save_folder
from trainer.config.schema import CheckpointSection
from trainer.config.terms import SAVE
from trainer.launch.relaunch import Launch, has_committed, note
from trainer.run.build import Run


def is_directed(section: CheckpointSection) -> bool:
    """Return whether the command sets the start of the run other than the newest checkpoint."""
    return section.load != "auto" or section.ckpt_step is not None or section.finetune or section.no_load_optim


def find_launch(run: Run) -> tuple[Launch, bool]:
    """Return the launch that started rank 0, and whether this is its restart after it saved checkpoints of its own.

    A call of all ranks. Without a shared folder every host keeps the record of the launch, since rank 0's may be a new
    one. A launch that is not recorded has no names.
    """
    section, channel, own = run.config.checkpoint, run.cluster.channel, run.cluster.launch
    if save_folder(section) is None or not is_directed(section):
        return Launch((), ()), False
    names, earlier = json.loads(channel.broadcast("launch/names", json.dumps([own.names, own.earlier]).encode()))
    launch = Launch(tuple(names), tuple(earlier))
    found, problem = b"", None
    if _keeps_record(run):
        folders = run.saves.host_folders
        try:
            local = () if folders is None else folders.iterations
            found = b"+" if has_committed(_record_folder(run), launch, local) else b""
        except TrainerError as error:
            problem = error
    channel.agree("launch", problem)
    is_restarted = any(channel.gather("launch/restarted", found))
    return launch, bool(channel.broadcast("launch/known", b"+" if is_restarted else b""))


def _keeps_record(run: Run) -> bool:
    """Return whether this rank keeps the record of the launch: rank 0, or the leader of each host."""
    return run.cluster.rank == 0 or (run.saves.shared is None and run.saves.leads)


def _record_folder(run: Run) -> CheckpointFolder:
    folder = save_folder(run.config.checkpoint)
    assert folder is not None
    return CheckpointFolder(folder, Files())


def note_beginning(run: Run, launch: Launch, began_at: int | None) -> None:
    """Record where this launch began, so that a restart of it resumes; None for a restart. A call of all ranks."""
    problem: TrainerError | None = None
    folder = save_folder(run.config.checkpoint)
    if folder is not None and launch.names and _keeps_record(run):
        try:
            note(_record_folder(run), launch, began_at)
        except OSError as error:
            problem = cannot_write(folder, error, another=SAVE.another)
        except TrainerError as error:
            problem = error
    run.cluster.channel.agree("beginning", problem)
