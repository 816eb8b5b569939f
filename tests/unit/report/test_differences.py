from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.reported_runs import event, steady_run
from trainer.compare.curves import compare, tolerance_of
from trainer.compare.read import read_curve
from trainer.report.differences import difference_of
from trainer.report.history import read_history

BASE = [1.0, 2.0, math.nan, math.inf, 5.0]


@pytest.mark.parametrize(
    "losses",
    [
        BASE,
        [1.0, 2.0 + 1e-7, math.nan, math.inf, 5.0],
        [1.0, 2.5, math.nan, math.inf, 5.0],
        [1.0, 2.0, 3.0, math.inf, 5.0],
        [1.0, 2.0],
    ],
)
def test_the_verdict_is_that_of_compare_loss(tmp_path: Path, losses: list[float]) -> None:
    base, test = steady_run(tmp_path / "base", BASE), steady_run(tmp_path / "test", losses)
    curves = read_curve(base), read_curve(test)
    _, sizes, verdict = difference_of(read_history(base), read_history(test))
    assert verdict == compare(*curves, tolerance=tolerance_of(*curves)).verdict
    assert sizes.size == len(losses)
    assert math.isinf(sizes.max()) == (losses[2:3] == [3.0]), "a value that is finite in one run alone"


def test_validation_losses_are_in_the_verdict(tmp_path: Path) -> None:
    runs = []
    for name, loss in (("base", 1.0), ("test", 1.5)):
        folder = steady_run(tmp_path / name, [1.0, 2.0])
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(event("evaluation", 2, 9.0, valid_loss=loss, valid_loss_hex=loss.hex())) + "\n")
        runs.append(read_history(folder))
    assert difference_of(*runs)[2] == "DIFFERENT: 1 of 2 iterations, first at 2"
