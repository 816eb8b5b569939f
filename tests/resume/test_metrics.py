"""What a run records: every iteration once, whatever happened to its processes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from tests.harness import TINY, curve, launch, run_ok
from trainer.commands.compare_loss import main as compare_loss
from trainer.report.goodput import measure_goodput
from trainer.report.history import read_history
from trainer.report.life import life_of

BASE = [
    "model=gpt2_tiny",
    *TINY,
    "logging.tensorboard=true",
    "train.train_iters=12",
    "train.eval_interval=4",
    "train.eval_iters=1",
    "checkpoint.save_interval=4",
]
SAVES = ("save/seconds", "save/blocked_seconds", "save/slowdown_seconds", "save/written_bytes")
SCALARS = ("train/loss", "train/grad_norm", "train/lr", "train/tokens_per_second", "checkpoint/blocked_seconds")


def rows(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of twelve iterations."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run_ok(folder, BASE)
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of that run killed twice, and the log lines of its last part."""
    folder = tmp_path_factory.mktemp("broken") / "run"
    assert launch(folder, BASE, kill_after=6, saved=4).statuses == (-9,)
    assert launch(folder, BASE, kill_after=10, saved=8).statuses == (-9,)
    return folder, run_ok(folder, BASE).text


def test_metrics_show_every_iteration_once(unbroken: Path, broken: tuple[Path, str]) -> None:
    run, _ = broken
    assert [row[0] for row in curve(run)] == list(range(1, 13))
    assert curve(run) == curve(unbroken)
    for event, iterations in {"evaluation": [4, 8, 12], "save": [4, 8, 12]}.items():
        assert [row["iteration"] for row in rows(run) if row.get("event") == event] == iterations
    abandoned = sorted(path.name for path in run.glob("metrics.abandoned-*.jsonl"))
    assert abandoned == ["metrics.abandoned-1.jsonl", "metrics.abandoned-2.jsonl"]


def test_the_goodput_of_a_killed_run_adds_up_to_its_wall_time(broken: tuple[Path, str]) -> None:
    run, _ = broken
    launches = [json.loads(line) for line in (run / "launches.jsonl").read_text().splitlines()]
    assert [line["event"] for line in launches] == ["begin", "begin", "begin", "end"]
    history = read_history(run)
    goodput = measure_goodput(history)
    assert goodput is not None
    wall = launches[-1]["time"] - launches[0]["began"]
    assert sum(goodput.parts().values()) == pytest.approx(wall, rel=0.01)
    assert all(seconds >= -0.01 * wall for seconds in goodput.parts().values())  # no second counts twice
    assert all(goodput.parts()[part] > 0 for part in ("trained", "repeated", "evaluated", "starting", "between"))
    kinds = [(event.kind, event.iteration) for event in life_of(history) if event.kind in ("launch", "kill", "end")]
    assert kinds[::2] == [("launch", 0), ("launch", 4), ("launch", 8)]
    assert kinds[1::2] == [("kill", 6), ("kill", 10), ("end", 12)]


def test_tensorboard_shows_every_iteration_once(unbroken: Path, broken: tuple[Path, str]) -> None:
    for run in (unbroken, broken[0]):
        events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        for tag in SCALARS:
            assert [event.step for event in events.Scalars(tag)] == list(range(1, 13))
        for tag in ("valid/loss", *SAVES):
            assert [event.step for event in events.Scalars(tag)] == [4, 8, 12]
        shown = [event.value for event in events.Scalars("train/loss")]
        assert shown == pytest.approx([float.fromhex(row[1]) for row in curve(run)], rel=1e-6)


def points_in_files(run: Path) -> dict[str, list[int]]:
    """Return the iterations of every curve as they lie in the files, whatever a reader would make of doubled ones."""
    found = defaultdict[str, list[int]](list)
    for path in (run / "tensorboard").iterdir():
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found[value.tag].append(event.step)
    return {tag: sorted(steps) for tag, steps in found.items()}


def test_the_files_of_tensorboard_hold_every_point_once(unbroken: Path, broken: tuple[Path, str]) -> None:
    of_unbroken, of_broken = points_in_files(unbroken), points_in_files(broken[0])
    assert of_unbroken == of_broken
    assert all(of_broken[tag] == list(range(1, 13)) for tag in SCALARS)
    assert all(of_broken[tag] == [4, 8, 12] for tag in ("valid/loss", *SAVES))


def test_a_rewound_run_leaves_no_point_of_the_other_branch(tmp_path: Path) -> None:
    run_ok(tmp_path / "run", BASE)
    run_ok(tmp_path / "run", [*BASE, "checkpoint.ckpt_step=4", "train.exit_interval=6"])
    found = points_in_files(tmp_path / "run")
    assert all(found[tag] == list(range(1, 7)) for tag in SCALARS)
    assert found["valid/loss"] == [4]
    assert all(found[tag] == [4, 6] for tag in SAVES)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert {tag: [event.step for event in events.Scalars(tag)] for tag in found} == found


def test_log_lines_begin_as_loss_parsers_expect(broken: tuple[Path, str]) -> None:
    run, text = broken
    lines = [line for line in text.splitlines() if line.startswith("step") and "train loss" in line]
    pattern = (
        r"step +(\d+)/12 \| train loss (\d+\.\d{6}) \| norm \d+\.\d{4} \| lr \d\.\d{4}e-\d\d \| [\d.]+ ms \| \d+ tok"
    )
    last = curve(run)[-len(lines) :]
    assert [row[0] for row in last] == [9, 10, 11, 12]
    for line, row in zip(lines, last, strict=True):
        assert line.startswith(f"step {row[0]:5d}/12 | train loss {float.fromhex(row[1]):.6f} | ")
        assert re.match(pattern, line)


def test_hexadecimal_and_decimal_values_are_the_same(broken: tuple[Path, str]) -> None:
    training = [row for row in rows(broken[0]) if "loss" in row]
    assert len(training) == 12
    for row in training:
        for key in ("loss", "grad_norm", "lr"):
            assert float.fromhex(str(row[f"{key}_hex"])) == row[key]
        assert row["consumed_samples"] == 12 * int(str(row["iteration"]))
        assert float(str(row["seconds"])) > 0
        assert float(str(row["tokens_per_second"])) > 0
        assert float(str(row["checkpoint_seconds"])) >= 0
    for row in rows(broken[0]):
        if row.get("event") == "evaluation":
            assert float.fromhex(str(row["valid_loss_hex"])) == row["valid_loss"]


def test_compare_loss_proves_the_curves_equal(
    unbroken: Path, broken: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = broken
    assert compare_loss([str(unbroken), str(run), "--bitwise"]) == 0
    assert "bit-identical: 12/12 iterations" in capsys.readouterr().out

    text = (run / "metrics.jsonl").read_text()
    value = curve(run)[6][1]
    digit = "0" if value[12] != "0" else "1"
    (tmp_path / "metrics.jsonl").write_text(text.replace(value, value[:12] + digit + value[13:]))
    assert compare_loss([str(unbroken), str(tmp_path / "metrics.jsonl"), "--bitwise"]) == 1
    assert "DIFFERENT: 1 of 12 iterations, first at 7" in capsys.readouterr().out
