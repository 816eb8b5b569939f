"""Work with checkpoints: `reprise checkpoint ls|show|verify|diff|gather|copy|mirror|prune`.

Needs no GPU and no process group. The exit status is 0 when all is well, 1 when something is damaged, differs or is not
mirrored, 2 when the command fails. A temporarily unreadable file is not damaged.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

import reprise
from reprise import CheckpointStatus, CheckpointSummary, ProgressCallback, VerifiedCheckpoint
from reprise.errors import ConfigError, TrainerError, count_of
from reprise.format import INTERIM
from reprise.storage import dumps, exists, integer, is_url, json_file, shown_name
from reprise.stores import is_stored
from trainer.commands.arguments import any_path, local_path, natural, natural_or_all, positive
from trainer.commands.frame import FINE, IMPOSSIBLE, framed
from trainer.compare.text_table import duration, format_table
from trainer.config.saved import RUN_CONFIG, flattened
from trainer.metrics.json_lines import METRICS
from trainer.report.goodput import measure_goodput
from trainer.report.history import read_history, run_folder, topology_text

BAD = 1
_PART = "a part"  # for a checkpoint whose other pieces are on other hosts
_MOST_SHOWN = 10
_WIDEST = 60  # characters per list in a table
_LONG_LOG_BYTES = 32 << 20  # about 100,000 iterations, which take a second to read
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
                "notes": ", ".join([*marks.get(summary.path, ()), *_notes(summary)]),
                "held": str(summary.share or ""),
            }
        )
    if len(options.runs) == 1:
        rows = _without_columns(rows, "folder")
    status = _report(options, rows, summaries)
    unchecked = [summary.status for summary in summaries].count(CheckpointStatus.UNCHECKED)
    if unchecked and not options.json:
        verb = "was" if unchecked == 1 else "were"
        print(
            f"{unchecked} of {count_of(len(summaries), 'checkpoint')} {verb} not checked; --check all checks them too"
        )
    for run in () if options.json else options.runs:
        _print_goodput(run, name=f"{run}: " if len(options.runs) > 1 else "")
    return status


def _print_goodput(run: Path, *, name: str) -> None:
    """Print the breakdown of a run's wall time, if it has a log. For a long log, print the command to read it."""
    log = run_folder(run) / METRICS
    if is_url(str(run)) or not exists(log):
        return
    if (log_bytes := log.stat().st_size) > _LONG_LOG_BYTES:
        print(f"{name}goodput: `reprise report {run}` reads the {log_bytes / 1e6:.0f} MB of {METRICS}")
        return
    try:
        goodput = measure_goodput(read_history(run))
    except TrainerError as error:
        _log.warning("%s", error)
        return
    if goodput is not None:
        print(f"{name}{goodput}")


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
    if len(options.checkpoints) == 1 or all(result.share is None for result in results):
        rows = _without_columns(rows, "folder", "iteration")
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
    if not any(row["held"] for row in rows):
        rows = _without_columns(rows, "held")
    _print_rows(rows, as_json=options.json)
    damaged = (CheckpointStatus.DAMAGED, CheckpointStatus.UNREADABLE)
    for checkpoint in () if options.json else checkpoints:
        if checkpoint.status in damaged:
            print(f"{checkpoint.path}: {checkpoint.problem}")
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
    if options.json:
        document = {"state": contents.state, "files": files, "tensors": tensors, "aliases": contents.aliases}
        print(dumps({**document, "held": share} if share else document))
        return FINE
    print(f"{contents.path}\n")
    if share:
        print(f"A single host's folder, {share}\n")
    _print_rows([{"field": name, "value": value} for name, value in flattened(contents.state).items()], as_json=False)
    print()
    _print_rows(files, as_json=False)
    print()
    _print_rows(tensors, as_json=False)
    for alias, stored in contents.aliases.items():
        print(f"{alias} is {stored}")
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
    if options.json:
        print(dumps({"equal_tensors": difference.equal_tensors, "tensors": tensors, "state": state}))
    else:
        unequal = [row for row in tensors if options.all or row["found"] != "equal"]
        _print_rows(unequal, as_json=False)
        print(f"{difference.equal_tensors} of {len(tensors)} tensors are equal, bit for bit")
        _print_rows(state, as_json=False)
    return FINE if difference.is_empty else BAD


def gather(options: argparse.Namespace) -> int:
    """Join several hosts' folders into a single folder with the whole checkpoint."""
    with _progress_bar() as progress:
        report = reprise.gather(options.hosts, options.out, iteration=options.iteration, progress=progress)
    for problem in report.damage[:_MOST_SHOWN]:
        _log.warning("damaged, and taken from another folder: %s", problem)
    if len(report.damage) > _MOST_SHOWN:
        _log.warning("%d more damaged blocks were taken from other folders", len(report.damage) - _MOST_SHOWN)
    sources: list[Row] = [{"from": str(source.path), "bytes": source.copied_bytes} for source in report.sources]
    if options.json:
        document = {"checkpoint": str(report.path), "iteration": report.iteration, "bytes": report.total_bytes}
        print(dumps({**document, "sources": sources, "damage": report.damage}))
    else:
        _print_rows(sources, as_json=False)
        print(f"{report.path}: iteration {report.iteration}, whole")
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
    _print_rows(rows if options.json else _without_columns(rows, "deleted"), as_json=options.json)
    if not (rows or report.retained or options.json):
        print(f"{options.run} has no checkpoints")
    elif not options.json:
        verb = "would be" if report.is_dry_run else "was" if len(rows) == 1 else "were"
        print(f"{len(rows)} {verb} deleted, {len(report.retained)} {'stays' if len(report.retained) == 1 else 'stay'}")
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
    if not any(checkpoint.reason for checkpoint in checkpoints):
        rows = _without_columns(rows, "stays")
    if options.dry_run and not options.json:
        rows = _without_columns(rows, "dropped")
    _print_rows(rows, as_json=options.json)
    return FINE


def copy(options: argparse.Namespace) -> int:
    """Copy a checkpoint, or all of a run's, into a store, out of it, or between stores. Verify every byte."""
    with _progress_bar() as progress:
        results = reprise.copy(options.source, options.target, progress=progress)
    rows: list[Row] = [
        {"from": result.source, "to": result.target, "bytes": result.total_bytes, "copied": result.copied_bytes}
        for result in results
    ]
    _print_rows(rows, as_json=options.json)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reprise checkpoint", description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, call: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        subcommand = commands.add_parser(name, help=(call.__doc__ or "").rstrip("."), description=call.__doc__)
        subcommand.add_argument("--json", action="store_true", help="print JSON instead of tables")
        subcommand.set_defaults(call=call)
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
    uploaded = commands.add_parser("mirror", help=(mirror.__doc__ or "").rstrip("."), description=mirror.__doc__)
    uploaded.set_defaults(call=mirror)
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
    return parser


def _marks(summaries: Iterable[CheckpointSummary]) -> dict[Path, list[str]]:
    """Return notes on each folder's checkpoint with the lowest validation loss, and on those kept by a rule.

    Retention deletes all but the newest, so a rule keeps an older one, unless a `hold` file does.
    """
    marks = defaultdict[Path, list[str]](list)
    for _, group in groupby(summaries, attrgetter("folder")):
        table = {s.iteration or 0: s for s in group if s.path.parent == s.folder and not (s.is_superseded or s.is_link)}
        losses = {number: (row.state or {}).get("valid_loss") for number, row in table.items()}
        for _, number in sorted((loss, -n) for n, loss in losses.items() if loss is not None)[:1]:
            marks[table[-number].path].append("best")
        numbers = [number for number in sorted(table) if INTERIM not in (table[number].state or ())]
        for number in numbers[: -_kept(table[numbers[-1]].path)] if numbers else ():
            marks[table[number].path] += [] if table[number].is_pinned else ["kept by a rule"]
    return marks


def _kept(path: Path) -> int:
    """Return how many of the newest checkpoints a run keeps, from a checkpoint's configuration. 0 keeps all."""
    try:
        document = {} if is_stored(path) else json_file.read(path / RUN_CONFIG)  # a store has a rule of its own
        return integer(document["config"]["checkpoint"]["max_checkpoint_keep"])
    except (OSError, TrainerError, LookupError, TypeError, ValueError):
        return 0


def _notes(summary: CheckpointSummary) -> list[str]:
    notes = {
        "link": summary.is_link,
        "held": summary.is_pinned,
        "superseded": summary.is_superseded,
        "adapters": summary.has_adapters,
        "optimizer dropped": summary.is_lightened,
    }
    return [note for note, is_so in notes.items() if is_so]


def _print_rows(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print rows with equal columns as JSON or as a table."""
    if as_json:
        print(dumps(rows))
        return
    if not rows:
        return
    head = ["size" if name == "bytes" else name for name in rows[0]]
    cells = [head, *([_cell(name, value) for name, value in row.items()] for row in rows)]
    print("\n".join(format_table(cells, align="<")))


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


def _without_columns(rows: Iterable[Row], *names: str) -> list[Row]:
    """Return rows without the given columns."""
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


main = framed(_parser, lambda options: options.call(options))
