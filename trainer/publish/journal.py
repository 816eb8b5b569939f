"""The journal of a published branch: the lines for its remote run, in an order that never changes.

A killed run trains some iterations again and logs them again. A journal holds each line once, as logged first, and
only grows. So the number of a line in its journal is a key for continuing the tracker's run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reprise.errors import DataError
from reprise.files import Files, read_regular, replace_file
from reprise.json_file import Json
from trainer.publish.log_reader import LogLine, parse

_CUT, _SENT = "cut", "is_sent"  # members of lines that are not for the tracker


@dataclass(frozen=True, slots=True)
class JournalHead:
    """The first line of a journal.

    Args:
        id: of the remote run.
        parent: the id of the remote run from which the branch goes off; None for the first.
        forked_at: the last iteration shared by both runs.
        lineage: the id of the run's branch in its `run.json`; None without saves.
        config: dotted keys and values for the remote run.
    """

    id: str
    parent: str | None
    forked_at: int | None
    lineage: str | None
    config: Mapping[str, object]


class Journal:
    """A journal, open for appending. One process has it open at a time.

    Attributes:
        count: the number of lines for the tracker.
        cuts: the number of the last cut of the log in the journal.
        is_sent: whether its remote run is complete.
    """

    def __init__(self, path: Path) -> None:
        """Open a journal, and remove a truncated last line.

        Raises:
            OSError: if it cannot be read or written.
            DataError: if a line is damaged.
        """
        self.path = path
        data = read_regular(path)
        size = data.rfind(b"\n") + 1
        if size < len(data):
            os.truncate(path, size)
        first, *lines = data[: max(size - 1, 0)].decode(errors="replace").split("\n")
        self.count, self.cuts, self.is_sent = 0, 0, False
        self._bits: dict[tuple[int, str], tuple[str, ...]] = {}
        self._first = self._position = (0, data.find(b"\n") + 1)  # the number of a line for the tracker, and its offset
        try:
            self.head = JournalHead(**json.loads(first))
            for line in lines:
                self._note(line)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            fix = "Move its folder away, and publish to another --project: the run begins anew there."
            raise DataError("The journal of a published run is damaged", where=path, found=error, fix=fix) from error

    @staticmethod
    def create(path: Path, head: JournalHead, entries: Iterable[LogLine], *, cuts: int, files: Files) -> Journal:
        """Write a journal of these entries, each key once, and open it. The file appears whole or not at all."""
        members = {name: getattr(head, name) for name in JournalHead.__slots__}
        unique = {entry.key: entry.text for entry in reversed(list(entries))}
        lines = [json.dumps(members), json.dumps({_CUT: cuts}), *reversed(unique.values())]
        replace_file(files, path, "".join(f"{line}\n" for line in lines).encode())
        return Journal(path)

    def diverges_at(self, entries: Iterable[LogLine]) -> int | None:
        """Return the iteration of the first entry in the journal with other bits, or None."""
        for entry in entries:
            if self._bits.get(entry.key, entry.bits) != entry.bits:
                return entry.iteration
        return None

    def extend(self, entries: Iterable[LogLine], *, cuts: int) -> None:
        """Append the entries whose keys are new, durably.

        Raises:
            OSError: if the disk fails; the journal is as before.
        """
        texts = dict[tuple[int, str], str]()
        for entry in entries:
            if entry.key not in self._bits:
                texts.setdefault(entry.key, entry.text)
        self._append([*texts.values(), *([json.dumps({_CUT: cuts})] if cuts != self.cuts else [])])

    def mark_sent(self) -> None:
        """Note the remote run as complete: it is not opened again."""
        self._append([json.dumps({_SENT: True})])

    def texts(self, start: int) -> Iterator[str]:
        """Yield the lines for the tracker from number `start` on."""
        number, offset = self._position if start >= self._position[0] else self._first
        with self.path.open("rb") as file:
            file.seek(offset)
            for data in file:
                offset += len(data)
                if parse(line := data.decode(errors="replace")) is not None:
                    number += 1
                    self._position = number, offset
                    if number > start:
                        yield line

    def _note(self, line: str) -> None:
        entry = parse(line)
        if entry is not None:
            self._bits[entry.key] = entry.bits
            self.count += 1
            return
        control: Json = json.loads(line)
        self.cuts = control.get(_CUT, self.cuts)
        self.is_sent = control.get(_SENT, self.is_sent)

    def _append(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        data = "".join(f"{line}\n" for line in lines).encode(errors="replace")
        with self.path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                while data:
                    data = data[file.write(data) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):  # the next start cuts a part of a line
                    file.truncate(size)
                raise
        for line in lines:
            self._note(line)
