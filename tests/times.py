"""The measured times of test files, by which the tests are dealt to processes. `make times` writes them from a run."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

PATH = Path(__file__).with_name("times.json")
SHORT_S = 2.0  # files of less are dealt last, in the order of the folders


def dealt(files: Sequence[Path], root: Path, selection: str) -> dict[Path, int]:
    """Return the place of each file: the longest first, and the short ones in the order of `files`.

    Args:
        selection: of the tests by their marks, as pytest's `-m` takes it.
    """
    kinds = ["gate", "slow"] if selection == "not nightly" else ["gate"]
    times = json.loads(PATH.read_text())
    seconds = sum((Counter(times[kind]) for kind in kinds), Counter[str]())
    names = {file: file.relative_to(root).as_posix() for file in dict.fromkeys(files)}
    ordered = sorted(names, key=lambda file: -seconds[names[file]])
    return {file: place for place, file in enumerate(ordered)}


class Times:
    """The seconds of a run's tests by kind and file, added up from its reports."""

    def __init__(self) -> None:
        self._seconds: dict[str, defaultdict[str, float]] = {"gate": defaultdict(float), "slow": defaultdict(float)}

    def add(self, file: str, seconds: float, *, is_slow: bool) -> None:
        self._seconds["slow" if is_slow else "gate"][file] += seconds

    def write(self) -> None:
        """Write the times of the files that are not short."""
        times = {
            kind: {file: round(seconds) for file, seconds in sorted(files.items()) if seconds >= SHORT_S}
            for kind, files in self._seconds.items()
        }
        PATH.write_text(json.dumps(times, indent=1) + "\n")
