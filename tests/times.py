"""The measured times of test files, by which `make test`, `make test-slow` and `make test-all` deal them to processes.

`python -m tests.times FAST SLOW` writes them from the reports (`--junitxml`) of the two commands.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

PATH = Path(__file__).with_name("times.json")
SHORT_S = 3.0  # files of less are dealt last, in the order of the folders


def dealt(files: Sequence[Path], root: Path, selection: str) -> dict[Path, int]:
    """Return the place of each file: the longest first, and the short ones in the order given.

    Args:
        selection: of the tests by their marks, as given to pytest.
    """
    kinds = {"slow and not soak": ["slow"], "not soak": ["fast", "slow"]}.get(selection, ["fast"])
    times = json.loads(PATH.read_text())
    seconds = sum((Counter(times[kind]) for kind in kinds), Counter[str]())
    names = {file: file.relative_to(root).as_posix() for file in dict.fromkeys(files)}
    ordered = sorted(names, key=lambda file: -seconds[names[file]])
    return {file: place for place, file in enumerate(ordered)}


def seconds_of(report: Path) -> dict[str, int]:
    """Return the seconds of each file that takes long, by its path in the repository."""
    total = defaultdict[str, float](float)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        total[case.get("classname", "").replace(".", "/") + ".py"] += float(case.get("time", "0"))
    return {name: round(seconds) for name, seconds in sorted(total.items()) if seconds >= SHORT_S}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the times of the reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fast", type=Path)
    parser.add_argument("slow", type=Path)
    options = parser.parse_args(arguments)
    times = {"fast": seconds_of(options.fast), "slow": seconds_of(options.slow)}
    PATH.write_text(json.dumps(times, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
