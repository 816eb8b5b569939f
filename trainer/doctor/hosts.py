"""Checks a launch's hosts, and whether they share a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from reprise.commit import Hosts, find_hosts
from reprise.errors import count_of
from reprise.storage import FILE_SYSTEM, why_unseen
from trainer.config.terms import WAY_OUT
from trainer.doctor.looks import BAD, FINE, Finding, folder, machine, missing_folders, remove
from trainer.launch.process_group import Cluster

_CHECKS_S = 24 * 3600.0  # limit for checking all hosts in turn


def look_at_hosts(path: Path, cluster: Cluster) -> Iterator[tuple[str, Sequence[Finding]]]:
    """Check every host in a launch, in turn to avoid slowing each other down. Call on all ranks.

    Yields:
        On rank 0, a title and the findings below it.

    Raises:
        TrainerError: A rank exits.
    """
    hosts = find_hosts(cluster.channel, cluster.local_ranks, "doctor")
    channel = cluster.channel.clone(_CHECKS_S)
    for number, leader in enumerate(hosts.leaders):
        key = f"doctor/{leader}"
        if cluster.rank == 0 and leader != 0:
            channel.put(f"{key}/turn", b"")
        if cluster.rank == leader:
            if leader != 0:
                channel.take(f"{key}/turn", sender="rank 0")
            findings = [*machine(), *folder(path)]
            channel.put(f"{key}/found", json.dumps([astuple(finding) for finding in findings]).encode())
        if cluster.rank == 0:
            findings = json.loads(channel.take(f"{key}/found", sender=f"rank {leader}"))
            yield _describe(hosts, number, hosts.ranks[number]), [Finding(*finding) for finding in findings]
    channel.from_first("doctor/looked", lambda: True)
    shared = one_folder(path, cluster, hosts)
    if cluster.rank == 0:
        count = f"{cluster.world_size} on {count_of(len(hosts.names), 'host')}"
        yield "all hosts", [Finding("ranks join", FINE, count), shared]


def one_folder(path: Path, cluster: Cluster, hosts: Hosts) -> Finding:
    """Check whether every rank sees a file that rank 0 makes in the folder. Call on all ranks.

    Returns:
        On rank 0, the finding.
    """
    what, files, problem = "one folder for all hosts", FILE_SYSTEM, ""
    mark = path / f".shared.{cluster.nonce}.mark"
    missing = missing_folders(path)
    try:
        if cluster.rank == 0:
            try:
                path.mkdir(parents=True, exist_ok=True)
                mark.touch()
            except OSError as error:
                problem = f"not known: {error.filename}: {error.strerror}"
        problem = cluster.channel.broadcast("doctor/marked", problem.encode()).decode()
        unseen = "" if problem or cluster.rank == 0 else why_unseen(mark, files.size)
        reasons = [reason.decode() for reason in cluster.channel.gather("doctor/unseen", unseen.encode())]
    finally:
        if cluster.rank == 0:
            with suppress(OSError):
                files.remove_file(mark)
            remove(missing)
    blind = [
        f"{_describe(hosts, number, blind_ranks)}: {reasons[blind_ranks[0]]}"
        for number, ranks in enumerate(hosts.ranks)
        if (blind_ranks := [rank for rank in ranks if rank < len(reasons) and reasons[rank]])
    ]
    if problem or not blind:
        return Finding(
            what, BAD if problem else FINE, problem or f"{count_of(len(hosts.names), 'host')} and every rank"
        )
    fix = f"Mount the same file system at this path on every host. {WAY_OUT}"
    return Finding(what, BAD, f"{mark.absolute()} of rank 0 cannot be seen by {'; '.join(blind)}. {fix}")


def _describe(hosts: Hosts, number: int, ranks: Sequence[int]) -> str:
    numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"host {hosts.names[number]} ({numbers})"
