"""The tests. `tests/README.md` says where each kind lies."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
