"""The record of where a launch began, by which a restart of it resumes instead of beginning again."""

from __future__ import annotations

import json

from trainer.build import Run
from trainer.checkpoint.storage.files import Files, cannot_write
from trainer.checkpoint.storage.folder import CheckpointFolder
from trainer.config.schema import CheckpointSection, save_folder
from trainer.errors import TrainerError
from trainer.launch.relaunch import Launch, has_committed, note


def is_directed(section: CheckpointSection) -> bool:
    """Return whether the command sets the start of the run other than the newest checkpoint."""
    return section.load != "auto" or section.ckpt_step is not None or section.finetune or section.no_load_optim


def is_restarted(run: Run) -> bool:
    """Return whether this is a restart of a launch that has checkpoints of its own. A call of all ranks; rank 0 knows.

    Without a shared folder every host keeps the record of the launch, since rank 0's may be a new one.
    """
    section, channel = run.config.checkpoint, run.cluster.channel
    if save_folder(section) is None or not is_directed(section):
        return False
    found, problem = b"", None
    launch = _launch_of_rank_0(run)
    if _keeps_record(run):
        local = run.local.folders.iterations if run.local is not None else ()
        try:
            found = b"+" if has_committed(_record_folder(run), launch, local) else b""
        except TrainerError as error:
            problem = error
    channel.agree("launch", problem)
    return any(channel.gather("launch/restarted", found))


def _launch_of_rank_0(run: Run) -> Launch:
    launch = run.cluster.launch
    data = run.cluster.channel.broadcast("launch/names", json.dumps([launch.names, launch.earlier]).encode())
    names, earlier = json.loads(data)
    return Launch(tuple(names), tuple(earlier))


def _keeps_record(run: Run) -> bool:
    """Return whether this rank keeps the record of the launch: rank 0, or the leader of each host."""
    return run.cluster.rank == 0 or (not run.is_shared and run.local is not None and run.local.folders.leads)


def _record_folder(run: Run) -> CheckpointFolder:
    folder = save_folder(run.config.checkpoint)
    assert folder is not None
    return CheckpointFolder(folder, Files())


def note_beginning(run: Run, began_at: int, *, is_restarted: bool) -> None:
    """Record where this launch began, so that a restart of it resumes. A call of all ranks."""
    problem: TrainerError | None = None
    save = save_folder(run.config.checkpoint)
    if save is not None:
        launch = _launch_of_rank_0(run)
        is_restarted = bool(run.cluster.channel.broadcast("launch/known", b"+" if is_restarted else b""))
        if launch.names and _keeps_record(run):
            try:
                note(_record_folder(run), launch, None if is_restarted else began_at)
            except OSError as error:
                problem = cannot_write(save, error)
            except TrainerError as error:
                problem = error
    run.cluster.channel.agree("beginning", problem)
