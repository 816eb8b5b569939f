"""Check whether this machine and a folder can train and save a run, and how fast: `reprise doctor [FOLDER|URL]`.

Under torchrun, checks every host, and whether they share the folder. The exit status is 0 when a run can train and save
here, 1 when it cannot, with the reason, 2 when the command fails.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.stores import is_store_url, probe_store
from trainer.commands.arguments import local_path
from trainer.commands.frame import BAD, FINE, framed

if TYPE_CHECKING:
    from trainer.doctor.looks import Finding

_JOIN_S = 300.0  # also for the slowest host's checks


def check(options: argparse.Namespace) -> int:
    """Check a store, or this machine and a folder, and return the exit status."""
    from trainer.doctor import looks
    from trainer.launch.environment import Environment

    place = options.folder
    if isinstance(place, str):
        verdicts = {True: looks.FINE, None: looks.WORSE, False: looks.BAD}
        return _print(looks.Finding(what, verdicts[is_fine], text) for what, is_fine, text in probe_store(place))
    environment = Environment.read(os.environ)
    host = f"{socket.gethostname()}: " if environment.world_size > 1 else ""
    status = FINE if environment.local_rank else _print(chain(looks.machine(), looks.folder(place)), host)
    return status if environment.world_size == 1 else status | _on_all_hosts(place)


def _print(findings: Iterable[Finding], host: str = "") -> int:
    """Print each finding as it arrives, and return the exit status."""
    from trainer.doctor import looks

    status = FINE
    for finding in findings:
        print(f"{host}{finding.verdict:8} {finding.what:28} {finding.found}", flush=True)
        status = BAD if finding.verdict == looks.BAD else status
    return status


def _on_all_hosts(path: Path) -> int:
    """Check on all ranks whether they share a folder, and return the exit status.

    Raises:
        TrainerError: The ranks do not join, or a rank exits.
    """
    from trainer.doctor.hosts import one_folder
    from trainer.launch import process_group

    cluster = process_group.start("cpu", deterministic=False, timeout_s=_JOIN_S)
    finding = one_folder(path, cluster.channel)
    status = int(cluster.channel.from_first("doctor/status", lambda: _print([finding])))
    process_group.shutdown(cluster)
    return status


def _place(text: str) -> str | Path:
    """Parse a folder, or a store's URL, which stays a text."""
    return text if is_store_url(text) else local_path(text)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", type=_place, default=".", help="where runs would be saved (here), or a store's URL"
    )


main = framed(check, _add_arguments)
