"""Check whether this machine and a folder can train and save a run, and how fast: `reprise doctor [FOLDER|URL]`.

Under torchrun, checks every host, and whether they share the folder. Rank 0 prints. The exit status is 0 when a
run can train and save here, 1 when it cannot, with the reason.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.stores import is_store_url, probe_store
from trainer.commands.arguments import local_path
from trainer.commands.frame import BAD, FINE, reporting

if TYPE_CHECKING:
    from trainer.doctor.looks import Finding

_JOIN_S = 300.0  # also for the slowest host's checks


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the machine and a folder, print a line per finding, and return the exit status."""
    parser = argparse.ArgumentParser(prog="reprise doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "folder", nargs="?", type=_place, default=".", help="where runs would be saved (here), or a store's URL"
    )
    options = parser.parse_args(arguments)
    return min(BAD, reporting(parser.prog, lambda: _check(options.folder)))  # after an error, no run can train here


def _place(text: str) -> str | Path:
    """Parse a folder, or a store's URL, which stays a text."""
    return text if is_store_url(text) else local_path(text)


def _check(place: str | Path) -> int:
    """Check a store or a folder, and return the exit status."""
    from trainer.doctor import looks
    from trainer.launch.environment import Environment

    if isinstance(place, str):
        verdicts = {True: looks.FINE, None: looks.WORSE, False: looks.BAD}
        return _print(looks.Finding(probe.what, verdicts[probe.is_fine], probe.found) for probe in probe_store(place))
    environment, findings = Environment.read(os.environ), chain(looks.machine(), looks.folder(place))
    if environment.world_size == 1:
        return _print(findings)
    return _on_all_hosts(place, [] if environment.local_rank else [*findings])


def _print(findings: Iterable[Finding]) -> int:
    """Print each finding as it arrives, and return the exit status."""
    from trainer.doctor import looks

    status = FINE
    for finding in findings:
        print(f"{finding.verdict:8} {finding.what:28} {finding.found}", flush=True)
        status = BAD if finding.verdict == looks.BAD else status
    return status


def _on_all_hosts(path: Path, findings: Sequence[Finding]) -> int:
    """Join the other ranks, print every host's findings, and return the exit status. Call on all ranks.

    Raises:
        TrainerError: The ranks do not join, or a rank exits.
    """
    from trainer.doctor.hosts import collect
    from trainer.launch import process_group

    cluster, status = process_group.start("cpu", deterministic=False, timeout_s=_JOIN_S), FINE
    for title, answers in collect(path, cluster, findings):
        print(title, flush=True)
        status |= _print(answers)
    status = int(cluster.channel.from_first("doctor/status", lambda: status))
    process_group.shutdown(cluster)
    return status
