"""The names of compared runs, and how they are drawn."""

from __future__ import annotations

from itertools import pairwise
from math import nan
from pathlib import Path

import pytest

from reprise.storage import Json
from trainer.compare.curves import Comparison, Curve, Tolerance, compare
from trainer.compare.plot import draw_comparisons, write_figure
from trainer.compare.table import name_runs
from trainer.metrics.log_file import columns_of


def curve(losses: dict[int, float]) -> Curve:
    records: list[tuple[int, Json]] = [(0, {"iteration": n, "loss_hex": loss.hex()}) for n, loss in losses.items()]
    return Curve("runs/a/metrics.jsonl", columns_of(records, ["loss"]), columns_of([], ["valid_loss"]))


def compared(*tests: dict[int, float]) -> list[Comparison]:
    base = curve({1: 3.0, 2: 2.0})
    return [compare(base, curve(test), tolerance=Tolerance(1e-5)) for test in tests]


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["runs/a/metrics.jsonl", "runs/b/metrics.jsonl"], ["a", "b"]),
        (["x/run/metrics.jsonl", "y/run/metrics.jsonl", "z/c/metrics.jsonl"], ["x/run", "y/run", "z/c"]),
        (["a/metrics.jsonl", "a/metrics.jsonl", "a/metrics.jsonl"], ["a", "a (2)", "a (3)"]),
        (["x/run/metrics.jsonl", "y/run/metrics.jsonl", "x/run/metrics.jsonl"], ["x/run", "y/run", "x/run (2)"]),
        (["logs/a.log", "logs/a/metrics.jsonl", "old/b.log"], ["a.log", "a", "b.log"]),
        (["/metrics.jsonl"], ["/"]),
    ],
)
def test_runs_are_named_by_the_part_of_the_path_that_differs(sources: list[str], names: list[str]) -> None:
    assert name_runs(sources) == names


def test_equal_curves_stay_visible_in_a_plot() -> None:
    pytest.importorskip("matplotlib")
    same = {1: 3.0, 2: 2.0}
    figure = draw_comparisons(compared(same, same, same, {1: 3.5, 2: nan}), ["base", "a", "b", "c", "d"])
    upper, lower = figure.axes
    for axes in (upper, lower):
        assert axes.get_ylabel()
        lines = [line for line in axes.lines if line.get_linestyle() != "None"]
        assert len(lines) == (5 if axes is upper else 4)
        for under, over in pairwise(lines):
            assert over.get_zorder() > under.get_zorder()
            assert over.get_linewidth() <= 0.8 * under.get_linewidth()
            assert over.get_color() != under.get_color()
    assert lower.get_yscale() == "symlog"
    assert lower.get_ylim()[0] < 0  # differences of 0 have a place on the axis


def test_a_plot_of_two_runs_shows_their_names_and_the_verdict(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_figure(draw_comparisons(compared({1: 3.0, 2: 2.0}), ["one rank", "two ranks"]), tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    for shown in ("one rank (base)", "two ranks: bit-identical: 2/2 iterations", "bit-identical: 2/2 iterations"):
        assert f"<!-- {shown} -->" in text
