"""Reads back what each tracker keeps, by its own format: for each remote run, the points of each curve."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

Curves = dict[str, list[tuple[int, str]]]  # pairs of an iteration and the bits of a value
_BLOCK_BYTES, _HEADER_BYTES = 32768, 7
_FULL, _LAST = 1, 4


def log_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, as W&B and SwanLab write behind a header of their own.

    Each part of a record, which may not cross a block, has a checksum (4 bytes), length (2) and kind (1) before it. See
    https://github.com/google/leveldb/blob/main/doc/log_format.md. A torn end is left out.
    """
    data, at, record = path.read_bytes(), _HEADER_BYTES, b""
    while at + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        at += _HEADER_BYTES + length
        if at > len(data):
            return
        record += data[at - length : at]
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def read_wandb(folder: Path, _: Path) -> dict[str, Curves]:
    """Read all files of a run in order, as `wandb sync --append` sends them: W&B drops rows of earlier steps."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs: dict[str, Curves] = {}
    last = defaultdict(lambda: -1)
    for path in sorted(folder.glob("publish/wandb/wandb/offline-run-*/run-*.wandb")):
        run_id = path.stem.removeprefix("run-")
        curves = runs.setdefault(run_id, defaultdict(list))
        for data in log_records(path):
            record = Record.FromString(data)
            row = {item.nested_key[0] or item.key: json.loads(item.value_json) for item in record.history.item}
            if not row or row["_step"] <= last[run_id]:
                continue
            last[run_id] = row["_step"]
            for name, value in row.items():
                if not name.startswith("_") and name != "iteration" and isinstance(value, int | float):
                    curves[name].append((row["iteration"], float(value).hex()))
    return runs


def read_mlflow(_: Path, store: Path) -> dict[str, Curves]:
    """Read the tables of a database."""
    with sqlite3.connect(store / "mlflow.db") as database:
        ids = dict(database.execute("select run_uuid, value from tags where key = 'reprise.run'"))
        rows = database.execute("select run_uuid, key, step, value, is_nan from metrics order by step").fetchall()
    runs: dict[str, Curves] = {run_id: defaultdict(list) for run_id in ids.values()}
    for uuid, name, step, value, is_nan in rows:
        number = math.nan if is_nan else math.inf if value == sys.float_info.max else value
        runs[ids[uuid]][name].append((step, number.hex()))
    return runs


def read_trackio(_: Path, store: Path) -> dict[str, Curves]:
    """Read the table of a database."""
    (path,) = store.glob("reprise*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select run_id, step, metrics from metrics order by step").fetchall()
    runs: dict[str, Curves] = {}
    for run_id, step, text in rows:
        for name, value in json.loads(text).items():
            if name != "spike/figure":
                runs.setdefault(run_id, defaultdict(list))[name].append((step, float(value).hex()))
    return runs


def read_swanlab(folder: Path, _: Path) -> dict[str, Curves]:
    """Read the records that `swanlab sync` sends: the server drops points up to the last one of a curve."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    runs: dict[str, Curves] = {}
    for run in (folder / "publish/swanlab").iterdir():
        if run.is_dir():
            curves = runs.setdefault(run.name, defaultdict(list))
            for path in sorted(run.glob("run-*/run-*.swanlab")):
                for data in log_records(path):
                    scalar = Record.FromString(data).scalar
                    if scalar.key and scalar.step > max(curves[scalar.key], default=(-1,))[0]:
                        curves[scalar.key].append((scalar.step, scalar.value.number.hex()))
    return runs


READERS: dict[str, Callable[[Path, Path], dict[str, Curves]]] = {
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
    "swanlab": read_swanlab,
}
