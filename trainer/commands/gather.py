"""Joins the folders of several hosts into a complete checkpoint: `reprise checkpoint gather`."""

from __future__ import annotations

import argparse
import logging
import secrets
from collections.abc import Sequence

from tqdm import tqdm

from reprise.errors import CheckpointError
from reprise.files import Files
from reprise.folder import HOST, CheckpointFolder, FolderLock
from reprise.json_file import dumps
from reprise.local.join import join, newest_complete, open_parts
from reprise.reading import Checkpoint, LoadSource, no_folder, read_places
from trainer.commands.arguments import local_path, natural
from trainer.commands.rows import Row, print_rows

_log = logging.getLogger(__name__)

_ATTEMPT = "gather-"  # what the names of attempts of this command begin with
_MOST_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gather`."""
    folder_help = "a host's checkpoint.local.dir, or an iter_ folder in it"
    parser.add_argument("hosts", type=local_path, nargs="+", metavar="HOSTFOLDER", help=folder_help)
    parser.add_argument(
        "out", type=local_path, metavar="OUT", help="the checkpoint folder to write the iter_ folder to"
    )
    parser.add_argument("--iteration", type=natural, metavar="N", help="by default the newest that is whole together")


def gather(options: argparse.Namespace) -> int:
    """Write the checkpoint that the folders of several hosts hold together into one folder, whole."""
    parts = list[Checkpoint]()
    for path in options.hosts:
        if not path.is_dir():
            raise no_folder(path)
        parts += open_parts(LoadSource.named(path).path, Files())
    parts = newest_complete(parts, options.iteration)
    out = CheckpointFolder(options.out, Files())
    _refuse_host_folder(out)
    lock = FolderLock(out.root, secrets.token_hex(4))
    lock.acquire()
    try:
        for iteration, attempt in out.partials():  # of a call that was killed
            if attempt.startswith(_ATTEMPT):
                out.files.remove_tree(out.partial(iteration, attempt))
        _join(options, parts, out)
    finally:
        lock.release()
    return 0


def _join(options: argparse.Namespace, parts: Sequence[Checkpoint], out: CheckpointFolder) -> None:
    total = sum(place.spec.total_bytes for place in read_places(parts[0]).values())
    name = out.iteration(parts[0].iteration).name
    with tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        joined = join(parts, out, attempt=f"{_ATTEMPT}{secrets.token_hex(4)}", progress=bar.update)
    for problem in joined.damage[:_MOST_SHOWN]:
        _log.warning("damaged, and taken from another folder: %s", problem)
    if len(joined.damage) > _MOST_SHOWN:
        _log.warning("%d more damaged blocks were taken from other folders", len(joined.damage) - _MOST_SHOWN)
    sources: list[Row] = [{"from": str(part.path), "bytes": joined.taken_bytes[part.path]} for part in parts]
    if options.json:
        document = {"checkpoint": str(joined.path), "iteration": parts[0].iteration, "bytes": total}
        print(dumps({**document, "sources": sources, "damage": joined.damage}))
        return
    print_rows(sources, as_json=False)
    print(f"{joined.path}: iteration {parts[0].iteration}, whole")


def _refuse_host_folder(out: CheckpointFolder) -> None:
    """Refuse a folder of local checkpoints: a run would take a complete checkpoint there for damaged."""
    for iteration in out.committed():
        if (out.iteration(iteration) / HOST).exists():
            raise CheckpointError(
                "The output is the folder of a host",
                where=out.iteration(iteration) / HOST,
                fix="Name another folder, such as that of checkpoint.save.",
            )
