"""Check whether this machine and a folder can train and save a run, and how fast: `reprise doctor [FOLDER|URL]`.

Under torchrun, checks every host in turn, and whether they share the folder. Rank 0 prints. The exit status is 0 when a
run can train and save here, 1 when it cannot, with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.errors import TrainerError
from reprise.stores import is_store_url, probe_store
from trainer.commands.arguments import local_path

if TYPE_CHECKING:
    from trainer.doctor.looks import Finding

_JOIN_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the machine and a folder, print a line per finding, and return the exit status."""
    parser = argparse.ArgumentParser(prog="reprise doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", nargs="?", default=".", help="where runs would be saved (here), or a store's URL")
    options = parser.parse_args(arguments)
    from trainer.doctor.looks import folder, machine
    from trainer.launch.environment import Environment

    if is_store_url(options.folder):
        return _check_store(options.folder)
    try:
        options.folder = local_path(options.folder)
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument folder: {error}")
    try:
        if Environment.read(os.environ).world_size > 1:
            return _on_all_hosts(options.folder)
    except TrainerError as error:
        print(f"reprise doctor: {error}", file=sys.stderr)
        return 1
    return _print(chain(machine(), folder(options.folder)))


def _check_store(text: str) -> int:
    """Check a store from this process, and return the exit status."""
    from trainer.doctor.looks import BAD, FINE, WORSE, Finding

    try:
        probes = probe_store(text)
    except TrainerError as error:
        print(f"reprise doctor: {error}", file=sys.stderr)
        return 1
    verdicts = {True: FINE, None: WORSE, False: BAD}
    return _print(Finding(probe.what, verdicts[probe.is_fine], probe.found) for probe in probes)


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


if __name__ == "__main__":
    sys.exit(main())
