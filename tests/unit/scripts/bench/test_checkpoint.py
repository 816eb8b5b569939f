"""The benchmark runs, at a size at which its figures mean nothing: every row is there, and what is exact is sane."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.bench import checkpoint as bench_checkpoint
from scripts.bench.rounds import ROUND, Figure, Rounds, rotated
from scripts.bench.subject import SIZES
from scripts.bench.targets import BenchTarget
from scripts.bench.ways import BACKGROUND, DIRECT, INLINE, LIBRARY, RAW
from tests.harness import compose

OTHERS = ("torch.save", "safetensors save_file", "DCP save", "DCP async_save, thread")


@pytest.mark.nightly
def test_every_row_and_every_figure_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but saving in a process of its own, which takes seconds to start."""
    names = [RAW, DIRECT, INLINE, BACKGROUND, "ours, step at once", LIBRARY, *OTHERS]
    markdown, samples = tmp_path / "tables.md", tmp_path / "samples.json"
    arguments = [
        "--size",
        "small",
        "--growth-size",
        "small",
        "--rounds",
        "1",
        "--saves",
        "3",
        "--folder",
        str(tmp_path),
    ]
    arguments += ["--rows", ";".join(names), "--markdown", str(markdown), "--samples", str(samples)]
    assert bench_checkpoint.main(arguments) == 0
    text = capsys.readouterr().out
    assert markdown.read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.json", "tables.md"]
    rows = {name: cells for name, cells in _rows(text) if name in names}
    assert set(rows) == set(names)
    for name, cells in rows.items():
        assert "cannot run" not in " ".join(cells)
        disk = float(cells[-1])
        assert 1.0 <= disk < 1.2, name
    for letter in "abcdefghi":
        cells = [cells for name, cells in _rows(text) if name == letter]
        assert cells, letter
        assert not any(row[1] == "-" for row in cells), letter
    assert str(tmp_path) not in text


def _rows(text: str) -> list[tuple[str, list[str]]]:
    found = re.findall(r"^\| *(.*?) *\| *(.*?) *\|$", text, flags=re.M)
    return [(name, [cell.strip() for cell in rest.split("|")]) for name, rest in found]


def test_the_large_size_is_that_of_the_configuration() -> None:
    assert SIZES["gpt2_124m"] == compose(["model=gpt2_124m"]).model


def test_ratios_are_of_the_same_round() -> None:
    rounds = Rounds()
    rounds.all = [
        {RAW: {Figure.DURABLE: raw}, INLINE: {Figure.DURABLE: ours}} for raw, ours in ((1, 2), (4, 4), (2, 6))
    ]
    assert rounds.median(INLINE, Figure.DURABLE) == 4
    assert rounds.ratio(INLINE, Figure.DURABLE, RAW, Figure.DURABLE) == 2
    assert rounds.ratio(INLINE, Figure.DURABLE, ROUND, Figure.COPY) is None


def test_every_way_comes_first_in_turn() -> None:
    assert [rotated("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert sorted(rotated("abc", 1)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("measured", "most", "result"), [(1.0, 1.0, "met"), (1.01, 1.0, "MISSED"), (None, 1.0, ""), (2.0, None, "")]
)
def test_a_bound_is_met_or_missed_or_there_is_none(measured: float | None, most: float | None, result: str) -> None:
    assert BenchTarget("a", "a figure", measured, most).result == result
