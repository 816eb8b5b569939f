"""Check whether this machine and a folder can train and save a run, and how fast: `reprise doctor [FOLDER|URL]`.

Under torchrun, checks every host in turn, and whether they share the folder. Rank 0 prints. The exit status is 0 when a
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
from trainer.commands.frame import reporting

if TYPE_CHECKING:
    from trainer.doctor.looks import Finding

_JOIN_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the machine and a folder, print a line per finding, and return the exit status."""
    parser = argparse.ArgumentParser(prog="reprise doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", nargs="?", default=".", help="where runs would be saved (here), or a store's URL")
    options = parser.parse_args(arguments)
    if not is_store_url(options.folder):
        try:
            local_path(options.folder)
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument folder: {error}")
    return min(1, reporting(parser.prog, lambda: _check(options.folder)))  # after an error, no run can train here


def _check(place: str) -> int:
    """Check a store or a folder, and return the exit status."""
    from trainer.doctor.looks import BAD, FINE, WORSE, Finding, folder, machine
    from trainer.launch.environment import Environment

    if is_store_url(place):
        verdicts = {True: FINE, None: WORSE, False: BAD}
        return _print(Finding(probe.what, verdicts[probe.is_fine], probe.found) for probe in probe_store(place))
    if Environment.read(os.environ).world_size > 1:
        return _on_all_hosts(Path(place))
    return _print(chain(machine(), folder(Path(place))))


def _print(findings: Iterable[Finding]) -> int:
    """Print each finding as it arrives, and return the exit status."""
    status = 0
    for finding in findings:
        print(f"{finding.verdict:8} {finding.what:28} {finding.found}", flush=True)
        status = 1 if finding.is_bad else status
    return status


def _on_all_hosts(path: Path) -> int:
    """Check every host in a launch, and return the exit status. Call on all ranks.

    Raises:
        TrainerError: The ranks do not join, or a rank exits.
    """
    from trainer.doctor.hosts import look_at_hosts
    from trainer.launch import process_group

    cluster, status = process_group.start("cpu", deterministic=False, timeout_s=_JOIN_S), 0
    for title, findings in look_at_hosts(path, cluster):
        print(title, flush=True)
        status |= _print(findings)
    status = int(cluster.channel.from_first("doctor/status", lambda: status))
    process_group.shutdown(cluster)
    return status
