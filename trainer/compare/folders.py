"""Pairs the logs of two folders by their names, as `reprise compare-loss FOLDER FOLDER` compares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reprise.errors import DataError
from trainer.compare.read import LLMC_LOG, METRICS_FILE

_SUFFIXES = (".log", ".txt", ".jsonl")
_DTYPES = {"bfloat16": ("bfloat16", "bf16"), "float32": ("float32", "fp32")}


@dataclass(frozen=True, slots=True)
class LogPairs:
    """The logs of two folders.

    Args:
        both: by file name, the base's log and the test's.
        only_in_base: names of logs missing in the test's folder.
        only_in_test: names of logs missing in the base's folder.
    """

    both: Mapping[str, tuple[Path, Path]]
    only_in_base: tuple[str, ...] = ()
    only_in_test: tuple[str, ...] = ()


def is_log_folder(path: str | Path) -> bool:
    """Return whether a path is a folder of logs, and not the folder of a run."""
    folder = Path(path)
    return folder.is_dir() and not any((folder / name).exists() for name in (METRICS_FILE, LLMC_LOG))


def pair_logs(base: str | Path, test: str | Path) -> LogPairs:
    """Pair the logs (`.log`, `.txt`, `.jsonl`) of two folders.

    Raises:
        DataError: the folders have no log of the same name.
    """
    base_logs, test_logs = _logs(Path(base)), _logs(Path(test))
    names = sorted(base_logs.keys() & test_logs.keys())
    if not names:
        raise DataError(
            "Two folders have no log of the same name",
            where=f"{base} and {test}",
            expected=f"files that end in {', '.join(_SUFFIXES)}, or the folders of two runs with {METRICS_FILE}",
            found=f"{len(base_logs)} and {len(test_logs)} logs",
        )
    return LogPairs(
        {name: (base_logs[name], test_logs[name]) for name in names},
        tuple(sorted(base_logs.keys() - test_logs.keys())),
        tuple(sorted(test_logs.keys() - base_logs.keys())),
    )


def dtype_in_name(path: str | Path) -> str | None:
    """Return the dtype in the name of a log such as `gpt2_1_bfloat16.log`; None if there is none."""
    name = Path(path).stem.lower()
    return next((dtype for dtype, words in _DTYPES.items() if any(word in name for word in words)), None)


def _logs(folder: Path) -> dict[str, Path]:
    try:
        return {path.name: path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file()}
    except OSError as error:
        raise DataError("Cannot read a folder of logs", where=folder, found=error.strerror) from error
