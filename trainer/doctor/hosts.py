"""Checks a launch's hosts, and whether they share a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple
from pathlib import Path

from reprise.commit import Hosts, find_hosts
from reprise.errors import count_of
from reprise.ranks import StoreChannel
from reprise.storage import why_unseen
from trainer.config.terms import WAY_OUT
from trainer.doctor.looks import BAD, FINE, Finding, scratch_folder
from trainer.launch.process_group import Cluster


def collect(path: Path, cluster: Cluster, findings: Sequence[Finding]) -> list[tuple[str, Sequence[Finding]]]:
    """Collect all hosts' findings, and check whether they share a folder. Call on all ranks.

    Args:
        findings: This rank's findings. A host's first rank has some.

    Returns:
        On rank 0, titles and the findings below them.

    Raises:
        TrainerError: A rank exits.
    """
    channel = cluster.channel
    hosts = find_hosts(channel, cluster.local_ranks, "doctor")
    answers = channel.gather("doctor/found", json.dumps([astuple(finding) for finding in findings]).encode())
    shared = one_folder(path, channel, hosts)
    if channel.rank != 0:
        return []
    reports = list[tuple[str, Sequence[Finding]]]()
    for name, ranks in zip(hosts.names, hosts.ranks, strict=True):
        numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        reports.append((f"host {name} ({numbers})", [Finding(*finding) for finding in json.loads(answers[ranks[0]])]))
    count = f"{channel.world_size} on {count_of(len(hosts.names), 'host')}"
    return [*reports, ("all hosts", [Finding("ranks join", FINE, count), shared])]


def one_folder(path: Path, channel: StoreChannel, hosts: Hosts) -> Finding:
    """Check whether every rank sees a folder that rank 0 makes in a folder. Call on all ranks.

    Returns:
        On rank 0, the finding.
    """
    what, mark = "one folder for all hosts", ""
    with ExitStack() as stack:
        if channel.rank == 0:
            with suppress(OSError):  # its own checks have named it
                mark = str(stack.enter_context(scratch_folder(path)))
        mark = channel.broadcast("doctor/made", mark.encode()).decode()
        reason = why_unseen(Path(mark), os.stat) if mark else "there is none"
        reasons = channel.gather("doctor/unseen", reason.encode())
    problems = {hosts.number_of(rank): reason.decode() for rank, reason in enumerate(reasons) if reason}
    if not problems:
        return Finding(what, FINE, f"{count_of(len(hosts.names), 'host')} and every rank")
    hosts_reasons = "; ".join(f"host {hosts.names[number]}: {reason}" for number, reason in problems.items())
    fix = f"Mount the same file system at this path on every host. {WAY_OUT}"
    return Finding(what, BAD, f"{mark or path} of rank 0 cannot be seen by {hosts_reasons}. {fix}")
