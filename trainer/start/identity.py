"""Which run a start belongs to: finds a run's lineage before the load, and records it before training.

A run's folder has its lineage in `run.json`, and so has every local checkpoint folder.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.errors import CheckpointError, MismatchError, TrainerError, UnreadableError
from reprise.format import FRESH, Branch, Journal, Lineage, Parent, newest_lineage, saved_lineage
from reprise.loading import Checkpoint, open_checkpoint
from reprise.ranks import StoreChannel
from reprise.storage import CheckpointFolder, Json, is_dir, is_file, json_file
from trainer.config.derived import save_folder
from trainer.config.schema import Config
from trainer.config.terms import LOCAL
from trainer.launch.process_group import Cluster
from trainer.metrics.json_lines import METRICS
from trainer.metrics.jsonl_file import last_recorded_iteration
from trainer.run.build import Run
from trainer.saves.targets import Saves
from trainer.start.journal import RUN_FILE, read_journal, write_journal

if TYPE_CHECKING:
    from reprise.local import HostFolders

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostRecord:
    """A host's records about the run.

    Args:
        name: The host's name.
        run: The lineage in its run folder.
        saved: The lineages in its local checkpoint folder. Empty if the folder has no checkpoints.
    """

    name: str
    run: Lineage
    saved: tuple[Lineage, ...]


def find_lineage(config: Config, channel: StoreChannel, saves: Saves) -> Lineage:
    """Return the run's lineage, on every rank. It has no branches if the run is new, or from an earlier version.

    The run's folder decides, then the shared checkpoints, then the other hosts' records. Without local checkpoints,
    only the first matters before the load. Collective.

    Raises:
        TrainerError: A host's local checkpoints belong to another run. Every rank raises.
    """
    folders, path, data = saves.host_folders, Path(config.run.dir) / RUN_FILE, b""
    if folders is None:
        return _parsed(channel.from_first("lineage", lambda: _record(read_journal(path).lineage)))
    with channel.agreed("lineage/read"):
        if folders.leads or channel.rank == 0:
            data = json.dumps(_host_table(path, folders)).encode()
    tables, hosts = channel.gather("lineage/hosts", data), folders.hosts

    def choose() -> Json | None:
        pairs = zip(hosts.names, hosts.leaders, strict=True)
        return _record(
            _choose(config, saves.shared, [_host_record(name, json.loads(tables[rank])) for name, rank in pairs])
        )

    return _parsed(channel.from_first("lineage", choose))


def _host_table(path: Path, folders: HostFolders) -> Json:
    """Return this rank's records: from the run's folder and, on a host's leader, from local checkpoints."""
    table: Json = {"run": _record(read_journal(path).lineage), "saved": []}
    if folders.leads:
        folder = folders.folder
        if is_dir(folder.root) and (folder.committed() or folder.partials() or folder.superseded()):
            recorded = [read_journal(folder.root / RUN_FILE).lineage, _newest_saved(folder)]
            table["saved"] = [_record(lineage) for lineage in recorded if lineage.branches] or [None]
    return table


def _host_record(name: str, table: Json) -> HostRecord:
    return HostRecord(name, _parsed(table["run"]), tuple(map(_parsed, table["saved"])))


def _choose(config: Config, shared: CheckpointFolder | None, hosts: Sequence[HostRecord]) -> Lineage:
    local, metrics = config.checkpoint.local, Path(config.run.dir) / METRICS
    is_recorded = last_recorded_iteration(metrics) is not None or (shared is not None and bool(shared.committed()))
    return choose_lineage(
        Lineage() if shared is None else _newest_saved(shared),
        hosts,
        where=local.dir,
        has_records=is_recorded,
        adopts=local.adopt,
    )


def choose_lineage(
    shared: Lineage, hosts: Sequence[HostRecord], *, where: object, has_records: bool, adopts: bool
) -> Lineage:
    """Return the lineage for a run with local checkpoints. Pure.

    Args:
        shared: The newest shared checkpoint's lineage.
        hosts: The hosts in order, rank 0's first.
        where: The local checkpoint folder.
        has_records: Whether the run has checkpoints or metrics outside the hosts' folders.
        adopts: Whether to adopt local checkpoints if nothing else is known about the run.

    Raises:
        MismatchError: Hosts have local checkpoints from another run, or from another branch after as many rewinds. The
            message names them.
    """
    lineages = [hosts[0].run, shared, *(host.run for host in hosts[1:])]
    run = next((lineage.run for lineage in lineages if lineage.run is not None), None)
    saved = [lineage for host in hosts for lineage in host.saved]
    runs = {lineage.run for lineage in saved if lineage.run is not None}
    is_adopted = run is None and adopts and len(runs) < 2
    if is_adopted:
        run = next(iter(runs), None)
    recorded = [lineage for lineage in (*lineages, *saved) if lineage.branches and lineage.run == run]
    current = newest_lineage(recorded)
    has_unnamed = is_adopted or (current.branches[0].began_at > FRESH if current.branches else has_records)
    foreign_runs = {
        host.name: lineage.run
        for host in hosts
        for lineage in host.saved
        if (lineage.run != run if lineage.branches else not has_unnamed)
    }
    if foreign_runs:
        raise _another_run(foreign_runs, run, where)
    for host in hosts:
        for lineage in (host.run, *host.saved):
            if lineage in recorded and len(lineage.branches) == len(current.branches) and lineage != current:
                raise _two_branches(host.name, where)
    return current


def note_start(
    run: Run, journal: Journal, checkpoint: Checkpoint | None, began_at: int, *, is_own: bool, saved: int
) -> Json | None:
    """Record a start, and return the lineage for the run's later checkpoints. None for a run that saves nothing.

    A new run gets an id, and a start from an older checkpoint opens a branch. Newer checkpoints are set aside later.
    Collective.

    Args:
        journal: The journal, as read before the load.
        checkpoint: The run's source, if it is a checkpoint.
        began_at: The iteration from which the run continues.
        is_own: Whether `checkpoint` is the run's own.
        saved: The newest saved iteration kept by this start.

    Raises:
        TrainerError: The start cannot be recorded. Every rank raises.
    """
    channel, folders, folder = run.cluster.channel, run.saves.host_folders, Path(run.config.run.dir)
    if save_folder(run.config.checkpoint) is None:
        return None

    def note() -> Json:
        current = _next(run, journal, checkpoint, began_at, is_own=is_own)
        if run.config.checkpoint.is_directed and (launch := run.cluster.launch).names:
            names = current.launch if set(launch.earlier) & set(current.launch) else ()
            current = replace(current, launch=tuple(dict.fromkeys((*names, *launch.names))))
        updated = Journal(current, saved)
        write_journal(folder, updated, run.saves.files)
        return updated.record()

    updated = Journal.from_record(channel.from_first("lineage/noted", note))
    with channel.agreed("lineage/hosts noted"):
        if folders is not None and folders.leads:
            write_journal(folders.folder.root, Journal(updated.lineage), folders.folder.files, LOCAL.another)
            if run.saves.shared is None:  # each host may have its own run folder, and hold rank 0 at the next start
                write_journal(folder, updated, run.saves.files)
    return updated.lineage.record()


def _next(run: Run, journal: Journal, checkpoint: Checkpoint | None, began_at: int, *, is_own: bool) -> Lineage:
    saved = Lineage() if checkpoint is None else saved_lineage(checkpoint.state, where=checkpoint.path)
    lineage = saved if is_own and saved.extends(journal.lineage) else journal.lineage
    branch = Branch(secrets.token_hex(8), began_at)
    if not lineage.branches:
        parent = None if checkpoint is None or is_own else Parent(saved.run, checkpoint.iteration)
        return Lineage((branch if is_own else Branch(branch.id, FRESH),), parent)
    saves = (journal.saved, *run.saves.iterations())  # some may no longer exist
    return lineage.after_start(branch, newest_known=max(FRESH if number is None else number for number in saves))


def saved_lineages(folder: CheckpointFolder) -> Iterator[tuple[int, Lineage]]:
    """Yield a folder's committed iterations and their lineages, newest first. Damaged checkpoints are skipped.

    Raises:
        UnreadableError: A checkpoint cannot be read at the moment.
    """
    for iteration in reversed(folder.committed()):
        path = folder.iteration(iteration)
        try:
            yield iteration, saved_lineage(open_checkpoint(path, folder.files, may_lack=True).state, where=path)
        except UnreadableError:
            raise
        except TrainerError as error:  # the load reports the damage
            _log.debug("%s tells no lineage: %s", path, error)


def _newest_saved(folder: CheckpointFolder) -> Lineage:
    return next((lineage for _, lineage in saved_lineages(folder)), Lineage())


def find_restart(cluster: Cluster, saves: Saves) -> bool:
    """Return whether the launcher restarted this launch after the launch saved a checkpoint. Collective.

    Each host checks its own folder, since rank 0 may have moved to a new host.

    Raises:
        TrainerError: A folder cannot be read. Every rank raises.
    """
    channel, is_restarted = cluster.channel, False
    earlier = set(channel.from_first("launch", lambda: list(cluster.launch.earlier)))
    if not earlier:
        return False
    with channel.agreed("launch/read"):
        folders = [f for f in saves.folders if (cluster.rank == 0 if f is saves.shared else saves.leads)]
        is_restarted = any(not earlier.isdisjoint(_launch_of(folder)) for folder in folders)
    answers = channel.gather("launch/restarted", json.dumps(is_restarted).encode())
    return bool(channel.from_first("launch/is_restarted", lambda: any(map(json.loads, answers))))


def _launch_of(folder: CheckpointFolder) -> Sequence[str]:
    """Return the launch names in a folder's newest checkpoint. Version 0.2 recorded them beside the checkpoint."""
    iteration, lineage = next(saved_lineages(folder), (FRESH, Lineage()))
    if lineage.launch or not is_file(path := folder.root / "launch.json"):
        return lineage.launch
    record = json_file.read(path)
    names, began_at = record.get("launches"), record.get("began_at")
    if type(began_at) is not int or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            "The record of a launch is malformed",
            where=path,
            expected="names and an iteration",
            fix="Delete it; the next start then follows checkpoint.load and checkpoint.ckpt_step.",
        )
    return names if iteration > began_at else ()


def _record(lineage: Lineage) -> Json | None:
    return lineage.record() if lineage.branches else None


def _parsed(record: Json | None) -> Lineage:
    return Lineage() if record is None else Lineage.from_record(record)


def _another_run(foreign_runs: dict[str, str | None], run: str | None, where: object) -> MismatchError:
    hosts = ", ".join(
        f"on host {name} those of {f'run {run_id}' if run_id else 'a run that they do not name'}"
        for name, run_id in foreign_runs.items()
    )
    fix = "Nothing was changed there. Set checkpoint.local.dir to another folder, or remove this one from these hosts."
    if run is None:
        fix += " If they are of this run, whose folder is lost, checkpoint.local.adopt=true goes on from them."
    return MismatchError(
        "A folder of local checkpoints belongs to another run",
        where=where,
        expected=f"those of run {run}" if run else "none, because this run is new",
        found=hosts,
        fix=fix,
    )


def _two_branches(name: str, where: object) -> MismatchError:
    return MismatchError(
        "The hosts have continued on two branches of the run",
        where=where,
        expected="the same lineage in every run.json, or a single longest lineage",
        found=f"another lineage of equal length on host {name}",
        fix="Choose the branch to give up, and move the local checkpoints and run.json on its hosts out of the way.",
    )
