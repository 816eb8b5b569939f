"""Reads `metrics.jsonl` while a run appends to it, and the side files of its cuts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reprise.files import open_regular, read_regular
from trainer.metrics.jsonl_sink import METRICS

_SIDE_FILE = re.compile(r"metrics\.abandoned-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A complete line of the log.

    Args:
        event: its kind; empty for an iteration of training.
        bits: the exact values in hexadecimal, by which two runs of an iteration are compared.
        text: the line, without its end.
    """

    iteration: int
    event: str
    bits: tuple[str, ...]
    text: str

    @property
    def key(self) -> tuple[int, str]:
        return self.iteration, self.event


def parse(text: str) -> LogLine | None:
    """Return the line with this text, which has no end of a line; None for a damaged one."""
    try:
        members = json.loads(text)
        iteration, event = members["iteration"], members.get("event", "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if type(iteration) is not int or iteration < 0 or not isinstance(event, str):
        return None
    bits = tuple(str(value) for name, value in sorted(members.items()) if name.endswith("_hex"))
    return LogLine(iteration, event, bits, text)


@dataclass(frozen=True, slots=True)
class LogUpdate:
    """The new part of a log.

    Args:
        contents: the content of the log before each new cut with the number of that cut, then the present content with
            the number of the last cut; or new lines alone.
        is_tail: whether the log only grew, so that `contents` has one member, the new lines.
    """

    contents: Sequence[tuple[int, Sequence[LogLine]]]
    is_tail: bool


class LogReader:
    """The log of a run folder. A rewind of the run replaces the file, and moves the lines cut off to a side file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inode, self._offset, self._cuts = -1, 0, 0

    def read(self, cuts: int, *, from_start: bool = False) -> LogUpdate:
        """Read the new part; a line without its end waits for the next call.

        Args:
            cuts: the number of the last cut whose side file was read before.
            from_start: read all, although the log may only have grown.

        Raises:
            OSError: if a file cannot be read.
        """
        while True:
            sides = self._sides()
            last = max(sides, default=0)
            is_same = not from_start and last == self._cuts
            lines, is_tail = self._lines(continues=is_same)
            # A cut writes its side file before it replaces the log: what was read is older than any cut not listed.
            if self._sides() == sides:
                break
            self._inode = -1
        self._cuts = last
        contents: list[tuple[int, Sequence[LogLine]]] = [(last, lines)]
        for number in () if is_tail else sorted((number for number in sides if number > cuts), reverse=True):
            side = list(_parsed(read_regular(sides[number])))
            contents.insert(0, (number, _before_cut(contents[0][1], side)))
        return LogUpdate(contents, is_tail)

    def _lines(self, *, continues: bool) -> tuple[list[LogLine], bool]:
        """Return the new lines of the log, and whether they continue those before; else they are all lines."""
        try:
            descriptor = open_regular(self._folder / METRICS)
        except FileNotFoundError:
            self._inode, self._offset = -1, 0
            return [], False
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            continues = continues and status.st_ino == self._inode and status.st_size >= self._offset
            file.seek(self._offset if continues else 0)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._inode, self._offset = status.st_ino, (self._offset if continues else 0) + len(complete)
        return list(_parsed(complete)), continues

    def _sides(self) -> dict[int, Path]:
        matches = [(_SIDE_FILE.fullmatch(name), name) for name in os.listdir(self._folder)]
        return {int(match[1]): self._folder / name for match, name in matches if match}


def _parsed(data: bytes) -> Iterator[LogLine]:
    """Yield the complete lines in the bytes of a file."""
    *texts, _ = data.decode(errors="replace").split("\n")
    for text in texts:
        line = parse(text)
        if line is not None:
            yield line


def _before_cut(content: Sequence[LogLine], side: Sequence[LogLine]) -> list[LogLine]:
    """Return the content of a log before a cut: the lines that stayed, and those in the side file of the cut.

    Args:
        content: the log after the cut, which may have grown since.
    """
    trained = [line.iteration for line in side if not line.event]
    events = [line.iteration + 1 for line in side if line.event]  # events alone: their iteration stayed
    first = min(trained or events, default=None)
    if first is None:
        return list(content)
    keys = {line.key for line in side}
    return [*(line for line in content if line.iteration < first and line.key not in keys), *side]
