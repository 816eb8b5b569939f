"""What a run records: every iteration once, whatever happened to its processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness import curve
from trainer.report.goodput import measure_goodput
from trainer.report.history import read_history
from trainer.report.life import life_of

SAVES = ("save/seconds", "save/blocked_seconds", "save/slowdown_seconds", "save/written_bytes")
SCALARS = ("loss/train", "train/grad_norm", "train/lr", "train/tokens_per_second", "train/blocked_seconds")
EVERY = list(range(1, 9))


def rows(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_metrics_show_every_iteration_once(reference: Path, killed: Path) -> None:
    assert [row[0] for row in curve(killed)] == EVERY
    assert curve(killed) == curve(reference)
    for event, iterations in {"evaluation": [4, 8], "save": [2, 4, 6, 8]}.items():
        assert [row["iteration"] for row in rows(killed) if row.get("event") == event] == iterations
    abandoned = sorted(path.name for path in killed.glob("metrics.abandoned-*.jsonl"))
    assert abandoned == ["metrics.abandoned-1.jsonl", "metrics.abandoned-2.jsonl"]


def test_the_goodput_of_a_killed_run_adds_up_to_its_wall_time(killed: Path) -> None:
    launches = [json.loads(line) for line in (killed / "launches.jsonl").read_text().splitlines()]
    assert [line["event"] for line in launches] == ["begin", "begin", "begin", "end"]
    history = read_history(killed)
    goodput = measure_goodput(history)
    assert goodput is not None
    wall = launches[-1]["time"] - launches[0]["began"]
    assert sum(goodput.parts.values()) == pytest.approx(wall, rel=0.01)
    assert all(seconds >= -0.01 * wall for seconds in goodput.parts.values())  # no second counts twice
    assert all(
        goodput.parts[part] > 0 for part in ("trained forward", "repeated", "evaluated", "started", "between launches")
    )
    kinds = [(event.kind, event.iteration) for event in life_of(history) if event.kind in ("launch", "kill", "end")]
    assert kinds[::2] == [("launch", 0), ("launch", 2), ("launch", 6)]
    assert kinds[1::2] == [("kill", 3), ("kill", 7), ("end", 8)]


def points_shown(run: Path) -> dict[str, dict[int, float]]:
    """Return the points of every curve that TensorBoard shows; no iteration is there twice."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    curves = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert all(len(dict(points)) == len(points) for points in curves.values())
    return {tag: dict(points) for tag, points in curves.items()}


def test_tensorboard_shows_every_point_once(reference: Path, killed: Path) -> None:
    for run in (reference, killed):
        points = points_shown(run)
        assert min(points) == "loss/train"
        assert all([*points[tag]] == EVERY for tag in SCALARS)
        assert [*points["loss/valid"]] == [4, 8]
        assert all([*points[tag]] == [2, 4, 6, 8] for tag in SAVES)
        losses = {int(str(row[0])): float.fromhex(row[1]) for row in curve(run)}
        assert points["loss/train"] == pytest.approx(losses, rel=1e-6)


def test_hexadecimal_and_decimal_values_are_the_same(killed: Path) -> None:
    training = [row for row in rows(killed) if "loss" in row]
    assert len(training) == 8
    for row in training:
        for key in ("loss", "grad_norm", "lr"):
            assert float.fromhex(str(row[f"{key}_hex"])) == row[key]
        assert row["consumed_samples"] == 12 * int(str(row["iteration"]))
        assert all(float(str(row[key])) > 0 for key in ("seconds", "tokens_per_second"))
        assert float(str(row["checkpoint_seconds"])) >= 0
    for row in rows(killed):
        if row.get("event") == "evaluation":
            assert float.fromhex(str(row["valid_loss_hex"])) == row["valid_loss"]
