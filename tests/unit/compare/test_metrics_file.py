"""A metrics.jsonl is read as `json` reads each of its lines."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.errors import DataError
from trainer.compare import metrics_file, read
from trainer.compare.columns import Points
from trainer.compare.read import parse_metrics, read_curves

FLOATS = st.floats() | st.floats(1e-6, 20) | st.sampled_from([0.0, -0.0, 5e-324, math.nan, math.inf, 1e308])
KEYS = st.sampled_from(["loss", "loss_hex", "grad_norm", "grad_norm_hex", "lr", "lr_hex", "seconds", "time", "event"])
ODD_VALUES = st.sampled_from(
    ["null", "NaN", "-Infinity", "1e5", "01", "1.", ".5", "-1", "1e-05", '"0x1.8p+1"', '"nan"', "[1]", "9" * 5000]
)


@st.composite
def lines(draw: st.DrawFn) -> str:
    """A line in the form of a run, with members left out, odd or repeated at times."""
    members = [f'"iteration": {draw(st.integers(0, 3) | st.integers(0, 2**63 - 1))}']
    for name in ("loss", "grad_norm", "lr"):
        if draw(st.integers(0, 9)) < 9:
            value = draw(FLOATS)
            text = json.dumps(value if math.isfinite(value) else None)
            members += [f'"{name}": {text}', f'"{name}_hex": "{value.hex()}"']
    members += ['"seconds": 0.25', f'"time": {draw(st.floats(0, 2e9))!r}']
    if draw(st.integers(0, 5)) == 0:
        members.insert(draw(st.integers(0, len(members))), f'"{draw(KEYS)}": {draw(ODD_VALUES)}')
    if draw(st.integers(0, 9)) == 0:
        members = ['"iteration": 7', '"event": "evaluation"', '"valid_loss": 2.5', '"valid_loss_hex": "0x1.4p+1"']
    return "{" + ", ".join(members) + "}"


def outcome(text: str) -> str:
    """Return the curve of a text with the bits of its numbers, or the error."""
    try:
        curve = parse_metrics(text, source="m")
    except DataError as error:
        return f"{error}"
    columns = Points.of(curve.points)
    bits = [[value.hex() for value in row] for row in columns.values.tolist()]
    masks = columns.exact.tolist(), columns.present.tolist()
    return repr((columns.iterations.tolist(), bits, masks, curve.evaluations, curve.notes))


@given(st.lists(lines(), max_size=6), st.sampled_from(["\n", ""]), st.integers(0, 40), st.integers(1, 300))
def test_every_text_gives_what_json_gives(written: list[str], end: str, cut: int, block_bytes: int) -> None:
    text = "\n".join(written) + end
    text = text if end else text[: len(text) - cut]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_file, "BLOCK_BYTES", block_bytes)
        quick = outcome(text)
        patch.setattr(metrics_file, "_LINES", re.compile(rb"(?!)"))
        assert quick == outcome(text)


def test_only_lines_of_few_members_need_no_json() -> None:
    quantities = ", ".join(f'"{name}": 0.5, "{name}_hex": "0x1.0000000000000p-1"' for name in metrics_file.QUANTITIES)
    few, many = (f'{{"iteration": 2, {quantities}{members * """, "n": 1"""}}}\n'.encode() for members in (50, 5000))
    lines = list[bytes]()
    for text in (few, many):
        metrics_file.read_points([text], read_line=lambda _, data: lines.append(data))
    assert lines == [many]


def test_a_repeat_after_an_unusable_record_is_not_named_first() -> None:
    line = '{"iteration": 2, "loss": 4.5, "loss_hex": "0x1.2000000000000p+2"}\n'
    usual = line.replace("}", ', "grad_norm": 0.0, "grad_norm_hex": "0x0.0p+0", "lr": 0.0, "lr_hex": "0x0.0p+0"}')
    unusable = line.replace('"0x1.2000000000000p+2"', "7")
    for written in (line, usual):
        assert "m, line 2" in outcome(written + unusable + written)
        assert "m, line 2" in outcome(written + written + unusable)


@pytest.mark.parametrize("odd", ["", '{"iteration": 99, "event": "save"}\n'])
def test_lines_of_several_forms_need_no_json(odd: str) -> None:
    """The expression made for the first line is not the only one."""
    names = ("loss", "grad_norm", "lr")
    quantities = ", ".join(f'"{name}": 0.5, "{name}_hex": "0x1.0000000000000p-1"' for name in names)
    forms = ('"seconds": 1.5', '"seconds": 1.5, "global_batch_size": 8', '"seconds": 9e-05')
    text = odd.join(f'{{"iteration": {n}, {quantities}, {forms[n % 3]}}}\n' for n in range(30))

    def read_odd(_: int, data: bytes) -> None:
        assert data.decode() == odd

    numbers, points = metrics_file.read_points([text.encode()], read_line=read_odd)
    assert points.iterations.tolist() == [*range(30)]
    assert numbers.tolist() == ([*range(1, 60, 2)] if odd else [*range(1, 31)])


def test_large_files_are_read_side_by_side_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "torn.jsonl")]
    line = '{"iteration": 2, "loss": 4.5, "loss_hex": "0x1.2p+2"}\n'
    for path, text in zip(paths, (line, line, "{\n" + line), strict=True):
        Path(path).write_text(text)
    curves = read_curves(paths[:2])
    with pytest.raises(DataError) as alone:
        read_curves(paths)
    monkeypatch.setattr(read, "_LARGE_BYTES", 0)
    assert read_curves(paths[:2]) == curves
    with pytest.raises(DataError) as beside:
        read_curves(paths)
    assert str(beside.value) == str(alone.value)
