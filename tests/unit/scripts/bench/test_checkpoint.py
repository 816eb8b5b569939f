"""The harness of the benchmarks, at a size at which its figures mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import checkpoint
from scripts.bench.rounds import Figure, Rounds, rotated
from scripts.bench.ways import BACKGROUND, INLINE, RAW


@pytest.mark.slow
def test_every_row_has_its_figures_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [RAW, INLINE, BACKGROUND, "torch.save"]
    arguments = ["--size", "small", "--rounds", "1", "--only", "ways", "--folder", str(tmp_path)]
    assert checkpoint.main([*arguments, "--rows", ";".join(names)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(tuple(f"| {n} " for n in names))]
    assert len(rows) == len(names)
    assert all(1.0 <= float(row.split("|")[-2]) < 1.2 for row in rows), "the bytes on the disk"
    assert list(tmp_path.iterdir()) == []


def test_ratios_are_of_the_same_round_and_every_way_comes_first() -> None:
    rounds = Rounds()
    rounds.all = [
        {RAW: {Figure.DURABLE: raw}, INLINE: {Figure.DURABLE: ours}} for raw, ours in ((1, 2), (4, 4), (2, 6))
    ]
    assert rounds.ratio(INLINE, Figure.DURABLE, RAW, Figure.DURABLE) == 2
    assert [rotated("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]
