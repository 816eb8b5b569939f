"""TensorBoard's event files as curves, and the times in logs of other programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from reprise.errors import DataError
from tests.messages import Printed, refused
from tests.unit.compare.test_logs import LOSSES, MEANS, megatron, titan, trainer_state
from trainer.commands import compare_loss, compare_speed
from trainer.compare.read import read_curve
from trainer.compare.speed import read_timing


def write_events(folder: Path, losses: dict[int, float], tag: str = "train/loss") -> Path:
    """Write event files as the Trainer of transformers and others do, with a clock of 2 s an iteration."""
    with SummaryWriter(str(folder)) as writer:
        for step, loss in losses.items():
            writer.add_scalar(tag, loss, step, walltime=1000.0 + 2 * step)
            writer.add_scalar("train/learning_rate", 0.5, step, walltime=1000.0 + 2 * step)
            writer.add_scalar("lm loss vs samples", loss, step * 8)
            writer.add_text("notes", "text", step)
        writer.add_scalar("eval/loss", 3.0, max(losses))
    return folder


@pytest.mark.parametrize(
    "tag", ["train/loss", "loss/train", "train/lm_loss", "lm loss", "loss", "loss_metrics/global_avg_loss"]
)
def test_event_files_are_read_as_their_programs_name_losses(tmp_path: Path, tag: str) -> None:
    folder = write_events(tmp_path / "events", LOSSES, tag)
    (file,) = folder.iterdir()
    for path in (folder, file):
        curve = read_curve(path)
        assert curve.points.iterations.tolist() == [*LOSSES]
        assert curve.points.values[0].tolist() == np.float32([*LOSSES.values()]).tolist()
        assert curve.points.values[2].tolist() == [0.5] * 3
        assert curve.meaning.describe(1) == "TensorBoard: as its program logged it"


def test_a_resumed_run_replaces_what_it_repeats(tmp_path: Path, capsys: Printed) -> None:
    folder = write_events(tmp_path / "resumed", {**LOSSES, 4: 9.5, 5: 9.25})
    (file,) = folder.iterdir()
    file.rename(folder / "events.out.tfevents.0000000001.host.1")
    write_events(folder, {3: 9.0, 4: 8.5})
    whole = write_events(tmp_path / "whole", {1: 10.95, 2: 10.5, 3: 9.0, 4: 8.5})
    assert compare_loss.main([str(folder), str(whole)]) == 0
    assert "3 lines from launches" in capsys.readouterr().out


def test_a_damaged_event_file_is_read_up_to_the_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, part = write_events(tmp_path / "whole", LOSSES), write_events(tmp_path / "part", LOSSES)
    (file,) = part.iterdir()
    data = bytearray(file.read_bytes())
    at = data.rindex(b"train/loss")
    data[at] ^= 1
    file.write_bytes(data)
    begin = len(data[:at]) - 40
    assert compare_loss.main([str(part), str(whole), "--max-rows", "1"]) == 1
    said = capsys.readouterr().out
    assert "MISSING: 1 in base (first at 3)" in said
    (place,) = (int(word) for word in re.findall(r"torn or damaged at byte (\d+)", said))
    assert begin < place < at
    file.write_bytes(data[: at - 3])
    assert f"at byte {place}," in str(read_curve(file).notes)
    file.write_bytes(data[:place])
    assert read_curve(file).notes == ()
    file.unlink()
    assert compare_loss.main([str(file), str(whole)]) == 2
    assert str(file) in capsys.readouterr().err


def seconds_of(path: Path) -> dict[int, float]:
    columns = read_timing(path, tokens=100).columns
    speeds = columns.column("tokens_per_second").tolist()
    seconds = columns.column("seconds").tolist()
    assert speeds == [100 / second for second in seconds]
    return dict(zip(columns.iterations.tolist(), seconds, strict=True))


def test_times_are_those_of_the_log_or_of_its_clock(tmp_path: Path) -> None:
    clock = "step,_timestamp,_step,train/loss\n10,100.5,0,2.5\n20,105.5,1,2.25\n20,999,2,\n30,3.0,3,2.0\n40,7.0,4,1.5\n"
    lines = titan(LOSSES).replace("58,897", "{}").format("57,500", "58,000", "59,250")
    later = titan(LOSSES).replace("[rank0]", "[rank1]").replace("58,897", "{}").format("57,503", "58,003", "59,253")
    for text, times in {
        megatron(MEANS): {10: 0.0091, 20: 0.0091, 30: 0.0091},
        megatron(MEANS, label="lm_loss", before=" samples/sec: 12.345 |"): {10: 0.0091, 20: 0.0091, 30: 0.0091},
        lines: {2: 0.5, 3: 1.25},
        "".join(f"{a}\n{b}\n" for a, b in zip(lines.splitlines(), later.splitlines(), strict=True)): {2: 0.5, 3: 1.25},
        clock: {20: 0.5, 40: 0.4},  # of two launches
    }.items():
        (tmp_path / "log").write_text(text)
        assert seconds_of(tmp_path / "log") == pytest.approx(times), text
    assert seconds_of(write_events(tmp_path / "events", LOSSES)) == {2: 2.0, 3: 2.0}


def test_speeds_of_logs_are_compared(tmp_path: Path, capsys: Printed) -> None:
    slow = dict.fromkeys(range(1, 12), 2.5)
    write_events(tmp_path / "a", slow)
    (tmp_path / "b.log").write_text(megatron(slow))
    words = [str(tmp_path / "a"), str(tmp_path / "b.log"), "--skip", "0", "--tokens", "4096"]
    assert compare_speed.main([*words, "--json"]) == 0
    medians = [run["tokens_per_second"]["median"] for run in json.loads(capsys.readouterr().out)["runs"]]
    assert medians == [2048.0, pytest.approx(4096 / 0.0091)]
    assert compare_speed.main([words[1], words[0], *words[2:]]) == 1
    assert "Megatron" in capsys.readouterr().out


def test_a_log_without_times_or_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(trainer_state(MEANS))
    with refused(DataError, "trainer_state.json", "report_to=tensorboard"):
        read_timing(tmp_path / "trainer_state.json", tokens=8)
    (tmp_path / "a.log").write_text(megatron(MEANS))
    with refused(DataError, "--tokens"):
        read_timing(tmp_path / "a.log")
    with SummaryWriter(str(tmp_path / "events")) as writer:
        writer.add_scalar("accuracy", 0.5, 1)
    with refused(DataError, "event files of TensorBoard"):
        read_curve(tmp_path / "events")
