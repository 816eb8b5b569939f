"""Work with checkpoints: `reprise checkpoint ls|show|verify|diff|gather|copy|mirror|prune`.

Needs no GPU and no process group. The exit status is 0 when all is well, 1 when something is damaged, differs or is not
mirrored, 2 when the command fails. A temporarily unreadable file is not damaged.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

import reprise
from reprise import CheckpointStatus, CheckpointSummary, ProgressCallback, VerifiedCheckpoint
from reprise.errors import ConfigError, TrainerError, count_of
from reprise.format import INTERIM
from reprise.storage import dumps, integer, json_file, shown_name
from reprise.stores import is_stored
from trainer.commands.arguments import any_path, local_path, natural, natural_or_all, positive
from trainer.commands.frame import BAD, FINE, IMPOSSIBLE, add_command, framed
from trainer.compare.text_table import duration, format_table
from trainer.config.saved import RUN_CONFIG, flattened
from trainer.report.history import topology_text

_PART = "a part"  # for a checkpoint whose other pieces are on other hosts
_WIDEST = 60  # characters per list in a table
Row = dict[str, Any]

_log = logging.getLogger(__name__)


def list_run(options: argparse.Namespace) -> int:
    """List the checkpoints of runs, checking only each file's header and first block."""
    summaries = reprise.list(*options.runs, check=options.check)
    rows, marks = list[Row](), _marks(summaries)
    whole = "yes" if options.json else "headers, first blocks"  # a later byte may be damaged
    for summary in summaries:
        state = summary.state
        rows.append(
            {
                "folder": str(summary.folder),
                "checkpoint": shown_name(summary.path),
                "iteration": summary.iteration,
                "bytes": summary.total_bytes,
                "age": time.time() - summary.written_at,
                "topology": "" if state is None else topology_text(state.get("topology", {})),
                "valid_loss": None if state is None else state.get("valid_loss"),
                "intact": _finding(summary, options, whole=whole, part=_PART, damaged="no"),
                "notes": ", ".join(_notes(summary, *marks)),
                "held": str(summary.share or ""),
            }
        )
    status = _report(options, rows, summaries)
    unchecked = [summary.status for summary in summaries].count(CheckpointStatus.UNCHECKED)
    if unchecked and not options.json:
        print(f"not checked: {unchecked} of {count_of(len(summaries), 'checkpoint')}; --check all checks them too")
    return status


def verify(options: argparse.Namespace) -> int:
    """Check every byte of checkpoints against their digests. In a single host's folder, check its pieces."""
    with _progress_bar() as progress:
        results = reprise.verify(*options.checkpoints, progress=progress)
    part = f"{_PART}: the pieces that it holds are whole"
    rows = [
        {
            "folder": str(result.path.parent),
            "checkpoint": shown_name(result.path),
            "iteration": result.iteration,
            "bytes": result.checked_bytes,
            "result": _finding(result, options, whole="whole", part=part),
            "held": str(result.share or ""),
        }
        for result in results
    ]
    return _report(options, rows, results)


def _finding(
    checkpoint: CheckpointSummary | VerifiedCheckpoint,
    options: argparse.Namespace,
    *,
    whole: str,
    part: str,
    damaged: str = "",
) -> str:
    """Describe a checkpoint's status. A problem is also printed below a table.

    Args:
        damaged: The word for a damaged checkpoint. By default its problem stands for it.
    """
    reason = f": {checkpoint.problem}" if options.json else ""
    return {
        CheckpointStatus.WHOLE: whole,
        CheckpointStatus.PART: part,
        CheckpointStatus.DAMAGED: f"{damaged}{reason}" if damaged else str(checkpoint.problem),
        CheckpointStatus.UNREADABLE: f"not known{reason}",
        CheckpointStatus.UNCHECKED: "not checked",
    }[checkpoint.status]


def _report(
    options: argparse.Namespace, rows: list[Row], checkpoints: Sequence[CheckpointSummary | VerifiedCheckpoint]
) -> int:
    """Print the rows, and return the exit status."""
    is_in_one = len({row["folder"] for row in rows}) <= 1
    damaged = (CheckpointStatus.DAMAGED, CheckpointStatus.UNREADABLE)
    problems = [f"{result.path}: {result.problem}" for result in checkpoints if result.status in damaged]
    _print(options, rows, _without(rows, "folder") if is_in_one else rows, *problems)
    statuses = {checkpoint.status for checkpoint in checkpoints}
    if CheckpointStatus.DAMAGED in statuses:
        return BAD
    if CheckpointStatus.UNREADABLE in statuses:
        return IMPOSSIBLE
    return FINE


def show(options: argparse.Namespace) -> int:
    """Show a checkpoint's content."""
    contents = reprise.show(options.checkpoint)
    tensors = [
        {
            "tensor": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": tensor.total_bytes,
            "file": tensor.file,
        }
        for tensor in contents.tensors
    ]
    files = [{"file": file.name, "bytes": file.total_bytes} for file in contents.files]
    share = str(contents.share or "")
    document = {"state": contents.state, "files": files, "tensors": tensors, "aliases": contents.aliases}
    fields = [{"field": name, "value": value} for name, value in flattened(contents.state).items()]
    host = (f"A single host's folder, {share}", "") if share else ()
    aliases = [f"{alias} is {stored}" for alias, stored in contents.aliases.items()]
    members = {"held": share} if share else {}
    _print(options, document | members, str(contents.path), "", *host, fields, "", files, "", tensors, *aliases)
    return FINE


def diff(options: argparse.Namespace) -> int:
    """Compare two checkpoints."""
    with _progress_bar(unit=" tensors", unit_scale=False) as progress:
        difference = reprise.diff(options.a, options.b, progress=progress)
    tensors = [
        {
            "tensor": tensor.name,
            "found": tensor.result,
            "largest difference": tensor.largest,
            "differing values": tensor.differing,
            "of": tensor.total,
            "detail": tensor.detail,
        }
        for tensor in difference.tensors
    ]
    state = [{"field": field.name, "A": field.a, "B": field.b} for field in difference.state]
    document = {"equal_tensors": difference.equal_tensors, "tensors": tensors, "state": state}
    unequal = [row for row in tensors if options.all or row["found"] != "equal"]
    equal = f"{difference.equal_tensors} of {len(tensors)} tensors are equal, bit for bit"
    _print(options, document, unequal, equal, state)
    return FINE if difference.is_empty else BAD


def gather(options: argparse.Namespace) -> int:
    """Join several hosts' folders into a single folder with the whole checkpoint."""
    with _progress_bar() as progress:
        report = reprise.gather(options.hosts, options.out, iteration=options.iteration, progress=progress)
    if report.damage:
        _log.warning("%d damaged blocks were taken from other folders: %s", len(report.damage), report.damage[0])
    sources: list[Row] = [{"from": str(source.path), "bytes": source.copied_bytes} for source in report.sources]
    document = {"checkpoint": str(report.path), "iteration": report.iteration, "bytes": report.total_bytes}
    document |= {"sources": sources, "damage": report.damage}
    _print(options, document, sources, f"{report.path}: iteration {report.iteration}, whole")
    return FINE


def prune(options: argparse.Namespace) -> int:
    """Delete all but the newest checkpoints, or old ones' optimizer state. Checkpoints with a `hold` file stay."""
    if options.optimizer != (options.before is not None):
        raise ConfigError("--optimizer and --before N must be used together", fix="Pass both, or --keep K.")
    if options.optimizer:
        return _drop_optimizer(options)
    report = reprise.prune(
        options.run, keep=options.keep, retain_interval=options.retain_interval, dry_run=options.dry_run
    )
    rows: list[Row] = [
        {"iteration": checkpoint.iteration, "bytes": checkpoint.total_bytes, "deleted": not report.is_dry_run}
        for checkpoint in report.expired
    ]
    verb = "would be deleted" if report.is_dry_run else "deleted"
    total = f"{len(rows)} of {len(rows) + len(report.retained)} checkpoints {verb}"
    _print(options, rows, _without(rows, "deleted"), total)
    return FINE


def _drop_optimizer(options: argparse.Namespace) -> int:
    checkpoints = reprise.drop_optimizer(options.run, before=options.before, dry_run=options.dry_run)
    rows: list[Row] = [
        {
            "iteration": checkpoint.iteration,
            "bytes": checkpoint.dropped_bytes,
            "dropped": not (options.dry_run or checkpoint.reason),
            "stays": checkpoint.reason,
        }
        for checkpoint in checkpoints
    ]
    _print(options, rows, rows)
    return FINE


def copy(options: argparse.Namespace) -> int:
    """Copy a checkpoint, or all of a run's, into a store, out of it, or between stores. Verify every byte."""
    with _progress_bar() as progress:
        results = reprise.copy(options.source, options.target, progress=progress)
    rows: list[Row] = [
        {"from": result.source, "to": result.target, "bytes": result.total_bytes, "copied": result.copied_bytes}
        for result in results
    ]
    _print(options, rows, rows)
    return FINE


def mirror(options: argparse.Namespace) -> int:
    """Upload a run's checkpoints to a store as they are saved."""
    from reprise.stores import mirror_run

    return mirror_run(options.run, options.url, keep=options.keep, interval=options.interval, once=options.once)


@contextlib.contextmanager
def _progress_bar(*, unit: str = "B", unit_scale: bool = True) -> Iterator[ProgressCallback]:
    """Yield a function to show a call's progress on a terminal, with a bar per name."""
    with contextlib.ExitStack() as stack:
        bars: list[tqdm[NoReturn]] = []

        def show_progress(name: str, count: int, total: int) -> None:
            if count == 0:
                stack.close()
                bar = tqdm(total=total, desc=name or None, unit=unit, unit_scale=unit_scale, disable=None, leave=False)
                bars[:] = [stack.enter_context(bar)]
            bars[0].update(count - bars[0].n)

        yield show_progress


def _add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, call: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        subcommand = add_command(commands.add_parser, name, call)
        subcommand.add_argument("--json", action="store_true", help="print JSON instead of tables")
        return subcommand

    runs_help = "run folders, checkpoint folders or host folders"
    listed = command("ls", list_run)
    listed.add_argument("runs", type=any_path, nargs="+", metavar="RUN", help=runs_help)
    check_help = "how many of each run's newest checkpoints to check, or `all` (%(default)s)"
    listed.add_argument("--check", type=natural_or_all, default=100, metavar="N", help=check_help)
    checkpoint_help = "an iter_ folder, or a run for its newest"
    command("show", show).add_argument("checkpoint", type=any_path, metavar="CHECKPOINT", help=checkpoint_help)
    command("verify", verify).add_argument(
        "checkpoints", type=any_path, nargs="+", metavar="CHECKPOINT", help="iter_ folders, or runs to check in full"
    )
    compared = command("diff", diff)
    compared.add_argument("a", type=any_path, metavar="A", help=checkpoint_help)
    compared.add_argument("b", type=any_path, metavar="B", help=checkpoint_help)
    compared.add_argument("--all", action="store_true", help="list equal tensors too")
    gathered = command("gather", gather)
    host_help = "a host's checkpoint.local.dir, or an iter_ folder in it"
    gathered.add_argument("hosts", type=local_path, nargs="+", metavar="HOSTFOLDER", help=host_help)
    gathered.add_argument("out", type=local_path, metavar="OUT", help="the checkpoint folder to write to")
    gathered.add_argument("--iteration", type=natural, metavar="N", help="default: the newest complete iteration")
    copied = command("copy", copy)
    copied.add_argument("source", type=any_path, metavar="SRC", help="a checkpoint folder or a run folder, or a URL")
    copied.add_argument("target", type=any_path, metavar="DST", help="the folder or URL to write iter_ folders to")
    uploaded = add_command(commands.add_parser, "mirror", mirror)
    uploaded.add_argument("run", type=local_path, metavar="RUN", help="a run folder, or its checkpoint folder")
    uploaded.add_argument("url", metavar="URL", help="the run's URL in the store, such as s3://bucket/run")
    uploaded.add_argument("--once", action="store_true", help="exit once all is uploaded; status 1 if some is not")
    uploaded.add_argument("--keep", type=natural, default=0, metavar="K", help="how many of the newest to keep (all)")
    uploaded.add_argument("--interval", type=natural, default=0, metavar="N", help="upload only multiples of N (all)")
    pruned = command("prune", prune)
    pruned.add_argument("run", type=any_path, metavar="RUN", help="a run's folder or URL")
    rules = pruned.add_mutually_exclusive_group(required=True)
    rules.add_argument("--keep", type=positive, metavar="K", help="how many of the newest to keep")
    rules.add_argument("--optimizer", action="store_true", help="delete only optimizer state; needs --before")
    pruned.add_argument("--before", type=natural, metavar="N", help="in all checkpoints before this iteration")
    pruned.add_argument("--retain-interval", type=natural, default=0, metavar="N", help="also keep multiples of N")
    pruned.add_argument("--dry-run", action="store_true", help="list the checkpoints to delete without deleting them")


def _marks(summaries: Iterable[CheckpointSummary]) -> tuple[set[Path], set[Path]]:
    """Return each folder's checkpoint with the lowest validation loss, and the older ones that a rule or a hold keeps.

    Retention deletes all others but the newest.
    """
    best, survivors = set[Path](), set[Path]()
    members = (row for row in summaries if row.path.parent == row.folder and not (row.is_superseded or row.is_link))
    for _, group in groupby(members, attrgetter("folder")):
        states = {(row.iteration or 0, row.path): row.state or {} for row in group}
        losses = [(state.get("valid_loss"), -number, path) for (number, path), state in states.items()]
        best |= {path for *_, path in sorted(row for row in losses if isinstance(row[0], float))[:1]}
        due = [path for (_, path), state in states.items() if INTERIM not in state]
        survivors |= {*due[: -_newest_kept(due[-1])]} if due else set()
    return best, survivors


def _newest_kept(path: Path) -> int:
    """Return how many of the newest checkpoints a run keeps, from a checkpoint's configuration. 0 keeps all."""
    try:
        document = {} if is_stored(path) else json_file.read(path / RUN_CONFIG)  # a store has a rule of its own
        return integer(document["config"]["checkpoint"]["max_checkpoint_keep"])
    except (OSError, TrainerError, LookupError, TypeError, ValueError):
        return 0


def _notes(summary: CheckpointSummary, best: Collection[Path], survivors: Collection[Path]) -> list[str]:
    notes = {
        "best": summary.path in best,
        "kept by a rule": summary.path in survivors and not summary.is_pinned,
        "link": summary.is_link,
        "held": summary.is_pinned,
        "superseded": summary.is_superseded,
        "adapters": summary.has_adapters,
        "optimizer dropped": summary.is_lightened,
    }
    return [note for note, is_so in notes.items() if is_so]


def _print(options: argparse.Namespace, document: object, *parts: str | Sequence[Row]) -> None:
    """Print a document as JSON, or the parts for people: lines, and rows as tables without their empty columns."""
    if options.json:
        print(dumps(document))
        return
    for part in parts:
        if isinstance(part, str):
            print(part)
        elif part:
            print("\n".join(_table(part)))


def _table(rows: Sequence[Row]) -> list[str]:
    names = [name for name in rows[0] if any(row[name] not in ("", None) for row in rows)]
    head = ["size" if name == "bytes" else name for name in names]
    return format_table([head, *([_cell(name, row[name]) for name in names] for row in rows)], align="<")


def _cell(name: str, value: object) -> str:
    if name == "bytes" and isinstance(value, int):
        return f"{value / 1e6:,.3f} MB" if value >= 1000 else f"{value} B"
    if name == "age" and isinstance(value, float):
        return duration(max(0.0, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and len(str(value)) > _WIDEST:
        return f"{len(value)} entries, --json shows them"
    return "" if value is None else str(value)


def _without(rows: Iterable[Row], name: str) -> list[Row]:
    """Return rows without a column."""
    return [{key: value for key, value in row.items() if key != name} for row in rows]


main = framed(lambda options: options.call(options), _add_commands)
