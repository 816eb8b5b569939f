"""Reads losses from other programs' logs: text lines, tables and JSON."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from reprise.errors import DataError, count_of
from reprise.storage import MAX_INTEGER, Json
from trainer.compare.curves import QUANTITIES, Curve
from trainer.compare.formats import (
    CLOCK,
    COUNT,
    ELAPSED,
    FORMATS,
    LINE_FORMS,
    LineForm,
    Meaning,
    column_form_of,
)
from trainer.metrics.log_file import VALID_LOSS, columns_of

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# The time before a line, as written by Python's logging and Megatron.
_CLOCK = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
_HEAD = 1 << 20  # how many characters to search for the log's form at first

Entry = tuple[str, Json]  # the place, and the record as in a metrics.jsonl
Row = tuple[str, Mapping[str, object]]  # the place, and the cells by name


@dataclass(frozen=True, slots=True)
class TextLog:
    """Another program's log.

    Attributes:
        source: The file, for messages.
        notes: Remarks on the file, such as damage. The parser adds its own.
        quantities: What to read.
    """

    text: str
    source: str
    notes: list[str] = field(default_factory=list)
    quantities: Sequence[str] = QUANTITIES


def parse_log(log: TextLog) -> Curve:
    """Parse a log in a format listed in `trainer.compare.formats`.

    A later launch replaces an earlier launch's points from its own first iteration on. If the last line lacks its
    newline, it may end inside a number, so it is read only up to its last `|`, `,` or space.

    Raises:
        DataError: There is no training loss, a loss is not a number, or a launch repeats iterations with different
            values.
    """
    meaning, points = _parse(log)
    if meaning.first == 0:
        log.notes.append(f"{log.source} counts from 0, as {meaning.program} does: its step 0 is iteration 1")
    if max(points) > MAX_INTEGER:
        raise DataError("An iteration is too large", where=log.source, expected=f"<= {MAX_INTEGER}", found=max(points))
    columns, none = columns_of([(0, points[n]) for n in sorted(points)], QUANTITIES), columns_of([], [VALID_LOSS])
    return Curve(log.source, columns, none, notes=tuple(log.notes), meaning=meaning)


def parse_times(log: TextLog) -> tuple[Meaning, dict[int, float]]:
    """Parse seconds by iteration from a log: logged durations, or else the differences between line times.

    A difference between lines averages over their iterations, including saves and evaluations. Launches count as in
    `parse_log`.

    Raises:
        DataError: As for `parse_log`, or the log has no times.
    """
    meaning, points = _parse(replace(log, quantities=(*QUANTITIES, ELAPSED, CLOCK)))
    clocks = sorted((n, point[CLOCK]) for n, point in points.items() if CLOCK in point)
    seconds = {n: point[ELAPSED] / 1000 for n, point in points.items() if ELAPSED in point} or {
        n: (end - begin) / (n - before)
        for (before, begin), (n, end) in itertools.pairwise(clocks)
        if end > begin  # otherwise the line is from another launch, whose clock starts again
    }
    if not seconds:
        raise DataError(
            "The log has no iteration times",
            where=log.source,
            expected="elapsed time per iteration (ms), a time before each line, or a column _timestamp, _runtime or "
            "wall_time",
            found=meaning.program,
            fix="An HF Trainer's trainer_state.json has no times. Its event files do (report_to=tensorboard).",
        )
    return meaning, seconds


def _parse(log: TextLog) -> tuple[Meaning, dict[int, Json]]:
    """Return what a log's losses mean, and the records by iteration."""
    log = replace(log, text=_CONTROL.sub("", log.text).replace("\r\n", "\n").replace("\r", "\n"))
    meaning, entries = _entries_of_table(log) or _entries_of_lines(log)
    points = _collect(entries, log)
    require_points(points, log.source)
    return meaning, points


def require_points(points: Sized, source: str) -> None:
    """Refuse a file without points.

    Raises:
        DataError: There are no points.
    """
    if not len(points):
        raise DataError("There is no training loss", where=source, expected=FORMATS, found="none of these")


def _collect(entries: Iterator[Entry], log: TextLog) -> dict[int, Json]:
    """Return the records by iteration. A launch that goes back replaces what an earlier one logged from there on.

    Raises:
        DataError: Two iterations repeat in a row with different losses, as where several ranks log.
    """
    points, repeated, last, replaced = dict[int, Json](), set[int](), -1, 0
    for where, record in entries:
        iteration = record["iteration"]
        earlier = points.get(iteration)
        if earlier is not None:
            if repr(earlier["loss"]) == repr(record["loss"]):  # NaN equals itself
                last = iteration
                continue
            repeated |= {iteration} if iteration == last else set()
            if len(repeated) > 1:  # two launches repeat at most one iteration at once
                raise DataError(
                    f"Iteration {iteration} comes twice with different values",
                    where=where,
                    expected=f"loss {earlier['loss']:.9g}",
                    found=f"loss {record['loss']:.9g}",
                    fix="For several ranks, keep one rank's lines.",
                )
        while points and next(reversed(points)) >= iteration:  # points are in order, as each launch's are
            points.popitem()
            replaced += 1
        points[iteration], last = record, iteration
    if replaced:
        launches = "launches that a later launch replaced"
        log.notes.append(f"{log.source}: {count_of(replaced, 'line')} from {launches} were left out")
    return points


def _entries_of_lines(log: TextLog) -> tuple[Meaning, Iterator[Entry]]:
    for end in (_HEAD, len(log.text)):
        for form in LINE_FORMS:
            if any(form.fields["loss"].search(match[2]) for match in form.pattern.finditer(log.text, 0, end)):
                return form.meaning, _read_lines(log, form)
    return Meaning(), iter(())


def _read_lines(log: TextLog, form: LineForm) -> Iterator[Entry]:
    text, quantities, number, seen = log.text, log.quantities, 1, 0
    for match in form.pattern.finditer(text):
        start, fields = match.start(), match[2]
        number, seen = number + text.count("\n", seen, start), start
        where = f"{log.source}, line {number}"
        is_torn = match.end() == len(text)
        if is_torn:
            fields = fields[: max(map(fields.rfind, "|, ")) + 1]
        tokens = {quantity: form.fields[quantity].search(fields) for quantity in form.fields if quantity in quantities}
        cells = {quantity: token[1].rstrip(",;)") for quantity, token in tokens.items() if token}
        if "loss" in cells:
            record = _record(match[1], cells, form.meaning, where)
            if CLOCK in quantities and (clock := _CLOCK.search(text, text.rfind("\n", 0, start) + 1, start)):
                with suppress(ValueError):  # there is no such day
                    record[CLOCK] = datetime.fromisoformat(clock[0]).timestamp()
            yield where, record
        elif is_torn:
            log.notes.append(f"{where} is torn (no newline at its end) and was left out")


def _entries_of_table(log: TextLog) -> tuple[Meaning, Iterator[Entry]] | None:
    """Return the entries in JSON or CSV, or None if the text has another form."""
    rows: Iterable[Row] = _rows_of_json(log)
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    if not names:
        header = log.text[:_HEAD].lstrip().partition("\n")[0]
        delimiter = max(",;\t", key=header.count)
        names, rows = next(csv.reader([header], delimiter=delimiter), []), _rows_of_csv(log, delimiter)
    form = column_form_of(names)
    if form is None:
        return None
    meaning, columns = form
    if len(losses := columns["loss"]) > 1:
        raise DataError(
            "Several columns hold a loss",
            where=log.source,
            expected="one",
            found=", ".join(losses),
            fix="Export one run and one loss.",
        )
    kinds = ("iteration", *log.quantities)
    chosen = {name: matches[0] for name, matches in columns.items() if matches and name in kinds}
    return meaning, _read_rows(rows, chosen, meaning)


def _read_rows(rows: Iterable[Row], columns: Mapping[str, str], meaning: Meaning) -> Iterator[Entry]:
    for where, row in rows:
        cells = {quantity: str(row[name]).strip() for quantity, name in columns.items() if row.get(name) is not None}
        count = cells.pop("iteration", "")
        if not count or not cells.get("loss"):
            continue
        if re.fullmatch(r"\d+\.0*", count):
            count = count.partition(".")[0]
        if not re.fullmatch(COUNT, count):
            raise DataError("A row with a loss has no iteration", where=where, expected="an integer", found=repr(count))
        yield where, _record(count, {quantity: cell for quantity, cell in cells.items() if cell}, meaning, where)


def _rows_of_json(log: TextLog) -> list[Row]:
    """Return the objects in a JSON document or in JSON lines. Empty for another text."""
    text, source = log.text, log.source
    if not re.match(r"\s*[\[{]", text):
        return []
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        if not column_form_of([*(first_object(text) or ())]):
            return []
        rows = {number: _object(line) for number, line in enumerate(text.split("\n"), 1) if line.strip()}
        damaged = [number for number, row in rows.items() if not row]
        log.notes.extend(f"{source}, line {number} is torn or damaged and was left out" for number in damaged)
        return [(f"{source}, line {number}", row) for number, row in rows.items() if row]
    entries = document.get("log_history", [document]) if isinstance(document, dict) else document
    entries = entries if isinstance(entries, list) else []
    return [(f"{source}, entry {number}", row) for number, row in enumerate(entries, 1) if isinstance(row, dict)]


def _rows_of_csv(log: TextLog, delimiter: str) -> Iterator[Row]:
    text, source = log.text, log.source
    complete = text if text.endswith(("\n", '"')) else text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(complete.lstrip()), delimiter=delimiter)
    for row in reader:
        yield f"{source}, line {reader.line_num}", row
    if complete is not text:
        log.notes.append(f"{source}, line {reader.line_num + 1} is torn (no newline at its end) and was left out")


def first_object(text: str) -> dict[str, object] | None:
    """Return the JSON object in a text's first line, or None."""
    return _object(text[:_HEAD].lstrip().partition("\n")[0])


def _object(line: str) -> dict[str, object] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _record(count: str, cells: Mapping[str, str], meaning: Meaning, where: str) -> Json:
    """Return a record as in a metrics.jsonl.

    Raises:
        DataError: A cell is not a number.
    """
    record: Json = {"iteration": int(re.sub(r"\D", "", count)) + 1 - meaning.first}
    for quantity, cell in cells.items():
        try:
            record[quantity] = float(cell)
        except ValueError as error:
            fix = "Write the log with decimal points, for example with LC_ALL=C." if "," in cell else None
            raise DataError("Cannot read a number", where=where, found=repr(cell[:60]), fix=fix) from error
    return record
