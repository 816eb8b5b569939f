"""The reader of a log: what it keeps of every value, which lines it refuses, and that chunks have no effect."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.errors import DataError
from tests.messages import refused
from tests.profiles import examples
from trainer.metrics import json_lines
from trainer.metrics.json_lines import ABSENT, DECIMAL, EXACT, UNREADABLE
from trainer.metrics.log_file import MetricsLog, read_lines

FLOATS = st.floats() | st.sampled_from([0.0, -0.0, 5e-324, math.nan, math.inf, 1e308])
ODD_VALUES = st.sampled_from([None, True, "0x1.8p+1", "nan", "low", [1], 10**400, 5, -1.5])


@st.composite
def records(draw: st.DrawFn) -> dict[str, object]:
    """A record as a run writes it, with members left out or odd at times."""
    record: dict[str, object] = {"iteration": draw(st.integers(0, 2**63 - 1))}
    for name in ("loss", "grad_norm"):
        value = draw(FLOATS)
        record |= {name: value if math.isfinite(value) else None, f"{name}_hex": value.hex()}
    record["seconds"] = draw(FLOATS.filter(math.isfinite))
    if draw(st.integers(0, 3)) == 0:
        record[draw(st.sampled_from([*record][1:]))] = draw(ODD_VALUES)
    if draw(st.integers(0, 5)) == 0:
        record.pop(draw(st.sampled_from([*record][1:])))
    return record if draw(st.integers(0, 9)) else {"iteration": 7, "event": "evaluation", "valid_loss": 2.5}


def read(text: str, *quantities: str) -> MetricsLog:
    return read_lines(io.BytesIO(text.encode()), "m", quantities)


def cells(log: MetricsLog) -> list[tuple[str, int]]:
    pairs = zip(log.columns.values.T.flatten().tolist(), log.columns.kinds.T.flatten().tolist(), strict=True)
    return [(value.hex(), kind) for value, kind in pairs]


@examples(100)
@given(st.lists(records(), max_size=6))
def test_a_column_has_what_each_record_has(written: Sequence[dict[str, object]]) -> None:
    """Records are read together, with the values that each has alone."""
    names = ("loss", "grad_norm", "seconds")
    log = read("".join(f"{json.dumps(record)}\n" for record in written), *names)
    alone = [read(f"{json.dumps(record)}\n", *names) for record in written]
    assert cells(log) == [cell for single in alone for cell in cells(single)]
    assert log.columns.iterations.tolist() == [n for single in alone for n in single.columns.iterations.tolist()]


@pytest.mark.parametrize(
    ("members", "value", "kind"),
    [
        ({"loss": 0.3, "loss_hex": (0.1 + 0.2).hex()}, 0.1 + 0.2, EXACT),
        ({"loss": None, "loss_hex": "nan"}, math.nan, EXACT),
        ({"loss": 0.25}, 0.25, DECIMAL),
        ({"loss": 2}, 2.0, DECIMAL),
        ({"loss": math.inf}, math.inf, EXACT),
        ({"loss": None}, math.nan, ABSENT),
        ({"loss": True}, math.nan, UNREADABLE),
        ({"loss": 1.0, "loss_hex": "0xzz"}, math.nan, UNREADABLE),
        ({"loss": 1.0, "loss_hex": 2.0}, math.nan, UNREADABLE),
        ({"loss_hex": "0x1p99999"}, math.nan, UNREADABLE),
    ],
)
def test_hex_goes_before_a_decimal(members: dict[str, object], value: float, kind: int) -> None:
    text = json.dumps({"iteration": 3, **members}) + "\n"
    for log in (read(text, "loss"), read(text + '{"iteration": 4, "loss": 1}\n', "loss")):
        assert cells(log)[0] == (value.hex(), kind)
        if kind == UNREADABLE:
            with refused(DataError, "m, line 1"):
                log.readable(log.columns)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_chunks_and_empty_lines_move_no_line(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(json_lines, "_CHUNK_LINES", chunk)
    evaluation = '{"iteration": 2, "event": "evaluation", "valid_loss": null, "valid_loss_hex": "nan"}\n'
    again = '{"iteration": 2, "event": "evaluation", "valid_loss": 1.5}\n'
    start = '{"iteration": 3, "loss": 1.5, "resumed": true}\n'
    log = read(f'\ufeff{{"iteration": 1, "loss": 0.5}}\n\n{evaluation}{start}{again}{{"iteration": 4, "lo', "loss")
    columns = log.columns
    assert (columns.lines.tolist(), columns.iterations.tolist()) == ([1, 4], [1, 3])
    assert columns.values[0].tolist() == [0.5, 1.5]
    assert columns.take(numpy.array([False, True])).lines.tolist() == [4]
    assert [line for line, _ in log.events] == [3, 5]
    assert [line for line, _ in log.starts] == [4]
    assert (log.evaluations.iterations.tolist(), log.evaluations.values.tolist()) == ([2], [[1.5]])
    assert log.notes == ("m, line 6 is torn (no newline at its end) and was left out",)


@pytest.mark.parametrize(
    "damaged", ['{"iteration": 2, "lo{"iteration": 2}', "[2]", '{"event": "x"}', '{"iteration": true}']
)
def test_a_damaged_line_is_refused(damaged: str) -> None:
    text = f'{{"iteration": 1, "loss": 0.5}}\n{damaged}\n'
    with refused(DataError, "m, line 2"):
        read(text, "loss")


@given(st.binary(max_size=400), st.integers(1, 9))
def test_lines_are_read_from_the_end(data: bytes, block: int) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "_BLOCK_BYTES", block)
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(data)
        backward = list(json_lines.tail(path))
    assert b"".join(reversed(backward)) == data
    assert all(line.count(b"\n") <= 1 for line in backward)
