"""Run the resumes of docs/support.md and write the page: `python -m scripts.make_tables`, or `make tables`.

The exit status is 0 if every load is bitwise, else 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.tables.page import page
from scripts.tables.runs import run_all
from trainer.commands.arguments import local_path
from trainer.config.options import CONFIGS

OUTPUT = CONFIGS.parent / "docs" / "support.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, write the page and name its file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=local_path, default=OUTPUT, help="the page")
    options = parser.parse_args(arguments)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        results = run_all(Path(folder), say)
    options.output.write_text(page(results), encoding="utf-8")
    print(options.output)
    return 0 if all(resumed.is_bitwise for resumed in results.resumed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
