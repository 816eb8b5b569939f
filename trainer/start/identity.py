"""Which run a start belongs to: finds a run's lineage before the load, and records it before training.

A run's folder has its lineage in `run.json`, and so has every local checkpoint folder.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from reprise.errors import CheckpointError, MismatchError
from reprise.format import FRESH, Branch, Journal, Lineage, Parent, newest_lineage, saved_lineage
from reprise.loading import Checkpoint
from reprise.storage import CheckpointFolder, Json
from trainer.config.load_saved import readable
from trainer.config.schema import Config
from trainer.config.terms import LOCAL
from trainer.launch.process_group import Cluster
from trainer.metrics.json_lines import METRICS
from trainer.metrics.jsonl_file import last_saved_iteration
from trainer.run.build import Run
from trainer.saves.targets import Saves
from trainer.start.journal import RUN_FILE, read_journal, write_journal

_log = logging.getLogger(__name__)


# A host's lineages: in its run folder, and in its local checkpoint folder, None if that has no checkpoints.
HostLineages: TypeAlias = tuple[Lineage, Lineage | None]


def find_journal(config: Config, cluster: Cluster, saves: Saves) -> Journal:
    """Return the run's journal, on every rank. It has no branches if the run is new, or from an earlier version.

    The run's folder decides, then the shared checkpoints, then the other hosts' records. Without local checkpoints,
    only the first matters before the load. The lineage's `launch` has the names in each folder's newest checkpoint:
    rank 0 may have moved to a new host. A lost or damaged `run.json`, or an earlier version's, does not say what was
    saved; the log does. Collective.

    Raises:
        TrainerError: A host's local checkpoints belong to another run. Every rank raises.
    """
    channel, folders, folder, shared = cluster.channel, saves.host_folders, Path(config.run.dir), saves.shared
    journal, table = Journal(), b""
    with channel.agreed("lineage/read"):
        if channel.rank == 0 if folders is None else folders.leads:
            journal = read_journal(folder / RUN_FILE)
            table = b"" if folders is None else json.dumps(_host_table(journal.lineage, folders.folder)).encode()
    tables = [] if folders is None else channel.gather("lineage/hosts", table)

    def find() -> Json:
        lineage, newest = journal.lineage, Lineage()
        if shared is not None and (folders is not None or (config.checkpoint.is_directed and cluster.launch.earlier)):
            newest = _newest_lineage(shared)
        launch = [*newest.launch]
        if folders is not None:
            hosts = dict[str, HostLineages]()
            for name, rank in zip(folders.hosts.names, folders.hosts.leaders, strict=True):
                run, saved, names = json.loads(tables[rank])
                hosts[name] = _parsed(run), None if saved is None else _parsed(saved)
                launch += names
            lineage = choose_lineage(newest, hosts, where=config.checkpoint.local.dir)
        saved = journal.saved
        if saved is None and not began_anew(lineage):  # else the log may have the saves that it gave up
            saved = last_saved_iteration(folder / METRICS)
        return {"lineage": _record(lineage), "launch": launch, "saved": FRESH if saved is None else saved}

    answer = channel.from_first("lineage", find)
    return Journal(replace(_parsed(answer["lineage"]), launch=tuple(answer["launch"])), answer["saved"])


def _host_table(run: Lineage, folder: CheckpointFolder) -> list[object]:
    """Return a host's lineages, and the launch names in its newest local checkpoint."""
    if not (folder.committed() or folder.partials() or folder.superseded()):
        return [_record(run), None, []]
    noted, newest = read_journal(folder.root / RUN_FILE).lineage, _newest_lineage(folder)
    return [_record(run), _record(noted if noted.branches else newest), newest.launch]


def choose_lineage(shared: Lineage, hosts: Mapping[str, HostLineages], *, where: object) -> Lineage:
    """Return the lineage for a run with local checkpoints. Pure.

    Args:
        shared: The newest shared checkpoint's lineage.
        hosts: The hosts' lineages by name, rank 0's first.
        where: The local checkpoint folder.

    Raises:
        MismatchError: Hosts have local checkpoints from another run, or from another branch after as many rewinds. The
            message names them.
    """
    first, *rest = (run for run, _ in hosts.values())
    lineages = [first, shared, *rest]
    run = next((lineage.run for lineage in lineages if lineage.run is not None), None)
    saved = {name: lineage for name, (_, lineage) in hosts.items() if lineage is not None}
    foreign = [
        f"on host {name} those of {f'run {lineage.run}' if lineage.run else 'a run that they do not name'}"
        for name, lineage in saved.items()
        if lineage.run is None or lineage.run != run
    ]
    if foreign:
        raise MismatchError(
            "A folder of local checkpoints belongs to another run",
            where=where,
            expected=f"those of run {run}" if run else "none, because this run is new",
            found=", ".join(foreign),
            fix="Nothing was changed there. Set checkpoint.local.dir to another folder, or remove this one from these "
            f"hosts. If they are of this run, whose folder is lost, copy {RUN_FILE} from there into run.dir.",
        )
    current = newest_lineage(lineage for lineage in (*lineages, *saved.values()) if lineage.run == run)
    for name, pair in hosts.items():
        for lineage in filter(None, pair):
            if lineage.run == run and len(lineage.branches) == len(current.branches) and lineage != current:
                raise MismatchError(
                    "The hosts have continued on two branches of the run",
                    where=where,
                    expected="the same lineage in every run.json, or a single longest lineage",
                    found=f"another lineage of equal length on host {name}",
                    fix="Choose the branch to give up, and move the local checkpoints and run.json on its hosts out of "
                    "the way.",
                )
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
    if run.config.checkpoint.folder is None:
        return None

    def note() -> Json:
        source = Lineage() if checkpoint is None else saved_lineage(checkpoint.state, where=checkpoint.path)
        current = source if is_own and source.extends(journal.lineage) else journal.lineage
        branch = Branch(secrets.token_hex(8), began_at)
        if current.branches:
            saves = (journal.saved, *run.saves.iterations())  # some may no longer exist
            current = current.after_start(branch, newest_known=max(n for n in saves if n is not None))
        elif is_own:
            current = Lineage((branch,))
        else:
            parent = None if checkpoint is None else Parent(source.run, checkpoint.iteration)
            current = Lineage((replace(branch, began_at=FRESH),), parent)
        if run.config.checkpoint.is_directed and (launch := run.cluster.launch).names:
            names = current.launch if set(launch.earlier) & set(current.launch) else ()
            current = replace(current, launch=tuple(dict.fromkeys((*names, *launch.names))))
        updated = Journal(current, saved)
        write_journal(folder, updated)
        return updated.record()

    updated = Journal.from_record(channel.from_first("lineage/noted", note))
    with channel.agreed("lineage/hosts noted"):
        if folders is not None and folders.leads:
            write_journal(folders.folder.root, Journal(updated.lineage), LOCAL.another)
            if run.saves.shared is None:  # each host may have its own run folder, and hold rank 0 at the next start
                write_journal(folder, updated)
    return updated.lineage.record()


def saved_lineages(folder: CheckpointFolder) -> Iterator[tuple[int, Lineage]]:
    """Yield a folder's committed iterations and their lineages, newest first, see `readable`.

    Those with a malformed lineage are skipped too: the load reports on them.

    Raises:
        UnreadableError: A checkpoint cannot be read at the moment.
    """
    for checkpoint in readable(folder, reversed(folder.committed())):
        with suppress(CheckpointError):
            yield checkpoint.iteration, saved_lineage(checkpoint.state, where=checkpoint.path)


def _newest_lineage(folder: CheckpointFolder) -> Lineage:
    return next((lineage for _, lineage in saved_lineages(folder)), Lineage())


def began_anew(lineage: Lineage) -> bool:
    """Return whether a run's newest branch starts it over, as `checkpoint.load=none` does."""
    return len(lineage.branches) > 1 and lineage.branches[-1].began_at == FRESH


def _record(lineage: Lineage) -> Json:
    return lineage.record() if lineage.branches else {}


def _parsed(record: Json) -> Lineage:
    return Lineage.from_record(record) if record else Lineage()
