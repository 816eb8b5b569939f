"""List, show, verify, compare, join and delete checkpoints: `reprise checkpoint ls|show|verify|diff|gather|prune`.

Needs no GPU and no process group. The exit status is 0 when all is well, 1 when something is damaged or differs, 2 when
the command cannot be carried out: a file that cannot be read now is not damaged.
"""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from reprise.errors import CheckpointError, TrainerError, UnreadableError
from reprise.files import Files
from reprise.folder import (
    ADAPTERS,
    HOLD,
    HOST,
    MANIFEST,
    WEIGHTS,
    CheckpointFolder,
    FolderLock,
    is_iteration_name,
    iteration_of,
    kind_of,
    named_iteration,
    shown_name,
)
from reprise.format.host_file import HostFile
from reprise.json_file import dumps
from reprise.layout import DTYPE_NAMES
from reprise.loading.accessories import misleading_files
from reprise.loading.difference import state_differences, tensor_differences
from reprise.loading.reader import check_first_blocks
from reprise.reading import Checkpoint, LoadSource, committed_in, no_folder, open_checkpoint, read_places, verify_share
from reprise.savers import Retention
from trainer.commands.arguments import natural, positive
from trainer.commands.gather import add_arguments, gather
from trainer.commands.host_parts import (
    PART,
    WHOLE,
    completeness_of,
    describe_held,
    held_bytes,
    pieces_by_host,
    without_damage,
)
from trainer.commands.rows import WIDEST, Row, flat, print_rows, without_columns

FINE, BAD, IMPOSSIBLE = 0, 1, 2
_UNKNOWN = "not known"  # of a checkpoint that cannot be read now
_SIZES = ("world_size", "dp", "tp", "pp", "vpp", "zero_stage")  # of a topology, all of them integers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="reprise checkpoint: %(message)s", stream=sys.stderr)
    call: Callable[[argparse.Namespace], int] = options.call
    try:
        return call(options)
    except TrainerError as error:
        print(f"reprise checkpoint: {error}", file=sys.stderr)
    except BrokenPipeError:  # the reader has seen enough
        sys.stdout = None
        return FINE
    except OSError as error:
        print(f"reprise checkpoint: {error.filename}: {error.strerror}", file=sys.stderr)
    return IMPOSSIBLE


def list_run(options: argparse.Namespace) -> int:
    """List the checkpoints of runs, without reading their tensors."""
    rows, parts = list[Row](), list[tuple[int, HostFile]]()
    for run in options.runs:
        folder = _folder(run)
        summaries = [_summary(path) for path in _iterations(folder)]
        if not summaries:
            raise CheckpointError("A folder holds no checkpoint", where=folder, expected="an iter_ folder")
        where = {"folder": str(folder)} if len(options.runs) > 1 else {}
        rows += [where | row for row, _ in summaries]
        parts += [(part.iteration, part.host) for _, part in summaries if part is not None and part.host is not None]
    return _report(options, rows, parts, folders=options.runs)


def _report(
    options: argparse.Namespace, rows: list[Row], parts: Sequence[tuple[int, HostFile]], *, folders: Sequence[Path]
) -> int:
    """Print rows, and for several folders the completeness of their parts together; return the exit status."""
    completeness = completeness_of(parts) if len(folders) > 1 else {}
    if not any(row["held"] for row in rows):
        rows = without_columns(rows, "held")
    if options.json and completeness:
        rows = [{**row, "together": completeness.get(row["iteration"])} for row in rows]
    print_rows(rows, as_json=options.json)
    for iteration, text in () if options.json else sorted(completeness.items()):
        print(f"iteration {iteration}: {text}")
    status = _status(str(row["valid"] if "valid" in row else row["result"]) for row in rows)
    return BAD if completeness and WHOLE not in completeness.values() and status == FINE else status


def show(options: argparse.Namespace) -> int:
    """Show the content of one checkpoint."""
    checkpoint = open_checkpoint(_checkpoint_of(options.checkpoint), Files())
    places = sorted(read_places(checkpoint).values(), key=lambda place: (place.file, place.offset))
    tensors = [
        {
            "tensor": place.spec.name,
            "dtype": DTYPE_NAMES[place.spec.dtype],
            "shape": list(place.spec.shape),
            "bytes": place.spec.total_bytes,
            "file": place.file,
        }
        for place in places
    ]
    files = [{"file": name, "bytes": entry.total_bytes} for name, entry in checkpoint.manifest.files.items()]
    aliases = dict(checkpoint.manifest.aliases)
    hosts, share = pieces_by_host(checkpoint), describe_held(checkpoint)
    if options.json:
        document = {"state": checkpoint.state, "files": files, "tensors": tensors, "aliases": aliases}
        print(dumps({**document, "hosts": hosts, "held": share} if hosts else document))
        return FINE
    print(f"{checkpoint.path}\n")
    if hosts:
        print(f"The folder of one host, {share}\n")
        print_rows(hosts, as_json=False)
        print()
    print_rows([{"field": name, "value": value} for name, value in flat(checkpoint.state)], as_json=options.json)
    print()
    print_rows(files, as_json=options.json)
    print()
    print_rows(tensors, as_json=options.json)
    for alias, stored in aliases.items():
        print(f"{alias} is {stored}")
    return FINE


def verify(options: argparse.Namespace) -> int:
    """Check every byte of checkpoints against their digests; of the folder of one host, the pieces that it holds."""
    rows, parts = list[Row](), list[tuple[int, HostFile]]()
    for path, is_named in [
        (path, path == argument) for argument in options.checkpoints for path in _checkpoints_of(argument)
    ]:
        row: Row = {"folder": str(path.parent), "checkpoint": shown_name(path), "iteration": named_iteration(path.name)}
        row |= {"bytes": None, "result": "whole", "held": ""}  # None until they have been read
        try:
            if not is_named:
                _refuse_link(path)
            checkpoint = open_checkpoint(path, Files())
            row |= {"iteration": checkpoint.iteration, "held": describe_held(checkpoint)}
            host = checkpoint.host
            try:
                row["bytes"] = _verify_all(checkpoint)
                _refuse_misleading(checkpoint)
                row["result"] = "whole" if checkpoint.is_whole else f"{PART}: the pieces that it holds are whole"
            except CheckpointError:
                host = None if host is None or len(options.checkpoints) == 1 else without_damage(checkpoint)
                raise
            finally:
                parts += [] if host is None else [(checkpoint.iteration, host)]
        except UnreadableError as error:
            row["result"] = f"{_UNKNOWN}: {error}"
        except TrainerError as error:
            row["result"] = str(error)
        rows.append(row)
    if not parts or len(options.checkpoints) == 1:
        rows = without_columns(rows, "folder", "iteration")
    return _report(options, rows, parts, folders=options.checkpoints)


def _verify_all(checkpoint: Checkpoint) -> int:
    total = held_bytes(checkpoint)
    with tqdm(total=total, desc=checkpoint.path.name, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        return verify_share(checkpoint, read_places(checkpoint), rank=0, world_size=1, progress=bar.update)


def _refuse_link(path: Path) -> None:
    """Refuse a link in a run's folder; a link named on the command line is followed."""
    if path.is_symlink():
        raise CheckpointError("An iteration is no checkpoint of this run", where=path, found=kind_of(path))


def _refuse_misleading(checkpoint: Checkpoint) -> None:
    """Refuse files which other readers of the folder would mistake for the checkpoint's."""
    names = misleading_files(checkpoint)
    if names:
        raise CheckpointError(
            "transformers would read a file that does not belong to the checkpoint",
            where=", ".join(str(checkpoint.path / name) for name in names),
            fix="Move it away; the checkpoint's own files are whole.",
        )


def diff(options: argparse.Namespace) -> int:
    """Compare two checkpoints."""
    a, b = (open_checkpoint(_checkpoint_of(path), Files()) for path in (options.a, options.b))
    total = len(a.manifest.tensors.keys() | b.manifest.tensors.keys())
    tensors = [
        {
            "tensor": difference.name,
            "found": difference.found,
            "largest difference": difference.largest,
            "differing values": difference.differing,
            "of": difference.total,
            "detail": difference.detail,
        }
        for difference in tqdm(tensor_differences(a, b), total=total, unit=" tensors", disable=None, leave=False)
    ]
    state = [
        {"field": name, "A": value_a, "B": value_b} for name, value_a, value_b in state_differences(a.state, b.state)
    ]
    equal = sum(row["found"] == "equal" for row in tensors)
    if options.json:
        print(dumps({"equal_tensors": equal, "tensors": tensors, "state": state}))
    else:
        unequal = [row for row in tensors if options.all or row["found"] != "equal"]
        print_rows(unequal, as_json=options.json)
        print(f"{equal} of {len(tensors)} tensors are equal, bit for bit")
        print_rows(state, as_json=options.json)
    return FINE if equal == len(tensors) and not state else BAD


def prune(options: argparse.Namespace) -> int:
    """Delete all but the newest checkpoints, those with a `hold` file, and every multiple of an interval."""
    folder = CheckpointFolder(_folder(options.run), Files())
    retention = Retention(options.keep, options.retain_interval)
    lock = None
    if not options.dry_run:
        lock = FolderLock(folder.root, secrets.token_hex(4))
        lock.acquire()
    try:
        committed = committed_in(folder)
        expired = retention.expired(committed, pinned=folder.held(committed))
        remaining = set(committed) - set(expired)
        if expired and not any(_is_valid(folder.iteration(iteration)) for iteration in remaining):
            raise CheckpointError(
                "None of the checkpoints that would stay is whole",
                where=folder.root,
                found=sorted(remaining),
                fix="The folder of one host holds parts; its run deletes by checkpoint.local.keep."
                if any((folder.iteration(iteration) / HOST).exists() for iteration in remaining)
                else None,
            )
        rows = [
            {"iteration": number, "bytes": _bytes(folder.iteration(number)), "deleted": not options.dry_run}
            for number in expired
        ]
        if lock is not None:
            for iteration in expired:
                lock.check()
                folder.files.remove_tree(folder.discard(iteration, secrets.token_hex(4)))
    finally:
        if lock is not None:
            lock.release()
    print_rows(rows, as_json=options.json)
    if not options.json:
        print(f"{len(expired)} {'would be' if options.dry_run else 'were'} deleted, {len(remaining)} stay")
    return FINE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reprise checkpoint", description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, call: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=(call.__doc__ or "").rstrip("."), description=call.__doc__)
        subparser.add_argument("--json", action="store_true", help="print JSON instead of tables")
        subparser.set_defaults(call=call)
        return subparser

    runs_help = "runs' folders, or their checkpoints', or the folders of hosts"
    command("ls", list_run).add_argument("runs", type=Path, nargs="+", metavar="RUN", help=runs_help)
    checkpoint_help = "an iter_ folder, or a run for its newest"
    command("show", show).add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=checkpoint_help)
    command("verify", verify).add_argument(
        "checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="iter_ folders, or runs for all of theirs"
    )
    compared = command("diff", diff)
    compared.add_argument("a", type=Path, metavar="A", help=checkpoint_help)
    compared.add_argument("b", type=Path, metavar="B", help=checkpoint_help)
    compared.add_argument("--all", action="store_true", help="list equal tensors too")
    add_arguments(command("gather", gather))
    pruned = command("prune", prune)
    pruned.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or its checkpoints'")
    pruned.add_argument("--keep", type=positive, required=True, metavar="K", help="how many of the newest stay")
    pruned.add_argument("--retain-interval", type=natural, default=0, metavar="N", help="multiples of it stay too")
    pruned.add_argument("--dry-run", action="store_true", help="list the checkpoints to delete, and delete none")
    return parser


def _folder(run: Path) -> Path:
    """Return the checkpoint folder of a run, given as the run's folder or as itself."""
    if not run.is_dir():
        raise no_folder(run)
    return LoadSource.named(run).path


def _iterations(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, then its saves of the weights alone."""
    candidates = (path for path in folder.iterdir() if is_iteration_name(path.name))
    weights = folder / WEIGHTS
    alone = _iterations(weights) if weights.is_dir() and not weights.is_symlink() else []
    return [*sorted(path for path in candidates if path.is_dir() or path.is_symlink()), *alone]


def _checkpoint_of(path: Path) -> Path:
    """Return the checkpoint given by its own folder, or the newest of a run."""
    if is_iteration_name(path.name):
        return path
    folder = CheckpointFolder(_folder(path), Files())
    committed = committed_in(folder)
    if not committed:
        raise CheckpointError("A folder holds no checkpoint", where=folder.root, expected="an iter_ folder")
    return folder.iteration(committed[-1])


def _checkpoints_of(path: Path) -> list[Path]:
    if is_iteration_name(path.name):
        return [path]
    folder = _folder(path)
    iterations = _iterations(folder)
    if not iterations:
        raise CheckpointError("A folder holds no checkpoint", where=folder, expected="an iter_ folder")
    return iterations


def _summary(path: Path) -> tuple[Row, Checkpoint | None]:
    """Return the row of a checkpoint, from its JSON files, headers and first blocks; None if it cannot be opened."""
    checkpoint: Checkpoint | None = None
    row: Row = {"checkpoint": shown_name(path), "iteration": iteration_of(path), "bytes": _bytes(path)}
    row["age"] = time.time() - _written_at(path)
    row["topology"], row["loss"] = "", None
    misleading, share = list[str](), ""
    try:
        _refuse_link(path)
        checkpoint = open_checkpoint(path, Files())
        check_first_blocks(checkpoint, read_places(checkpoint))
        row |= {"iteration": checkpoint.iteration, "topology": _topology(checkpoint)}
        row["loss"] = checkpoint.state.get("valid_loss")
        misleading = [f"{name} does not belong to it" for name in misleading_files(checkpoint)]
        row["valid"], share = ("yes" if checkpoint.is_whole else PART), describe_held(checkpoint)
    except UnreadableError as error:
        row["valid"] = f"{_UNKNOWN}: {error}"
    except TrainerError as error:
        row["valid"] = f"no: {error}"
    adapters = ["adapters"] if checkpoint is not None and ADAPTERS in checkpoint.manifest.files else []
    row["notes"] = ", ".join([*_notes(path), *adapters, *misleading])
    return {**row, "held": share}, checkpoint


def _status(findings: Iterable[str]) -> int:
    """Return the exit status: damage takes precedence over unreadable checkpoints."""
    problems = {finding for finding in findings if not finding.startswith(("yes", "whole", PART))}
    if not problems:
        return FINE
    return IMPOSSIBLE if all(finding.startswith(_UNKNOWN) for finding in problems) else BAD


def _notes(path: Path) -> list[str]:
    notes = ["link"] if path.is_symlink() else []
    notes += [HOLD] if (path / HOLD).exists() else []
    return notes if iteration_of(path) is not None else [*notes, "superseded"]


def _is_valid(path: Path) -> bool:
    return bool(_summary(path)[0]["valid"] == "yes")


def _topology(checkpoint: Checkpoint) -> str:
    """Return the number of ranks and the axes longer than 1, in words; an unknown topology is shown as it is."""
    recorded = checkpoint.state.get("topology", {})
    if not isinstance(recorded, dict) or any(type(recorded.get(name, 1)) is not int for name in _SIZES):
        return _short(recorded)
    sizes: dict[str, int] = {"world_size": 1, **recorded}
    ranks = sizes["world_size"]
    axes = [f"{name}={sizes[name]}" for name in ("dp", "tp", "pp", "vpp") if sizes.get(name, 1) > 1]
    zero = [f"zero_stage={sizes['zero_stage']}"] if sizes.get("dp", 1) > 1 and "zero_stage" in sizes else []
    return " ".join([f"{ranks} rank{'s' * (ranks != 1)}", *axes, *zero])


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= WIDEST else f"{text[:WIDEST]}..."


def _bytes(path: Path) -> int:
    if (path / HOST).exists():  # most of its files may be holes
        return Files().allocated_bytes(path)
    files = () if path.is_symlink() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if file.is_file())


def _written_at(path: Path) -> float:
    """Return the time a checkpoint was written, in Unix time; a `hold` file changes the folder's own time."""
    manifest = path / MANIFEST
    return (manifest if manifest.exists() else path).lstat().st_mtime


if __name__ == "__main__":
    sys.exit(main())
