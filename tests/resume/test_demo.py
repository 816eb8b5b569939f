"""`make demo`, with a smaller model: killed on one rank, resumed on two of each kind, the run has the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import demo
from tests.harness import curve, tensor_files
from tests.reported_runs import twice_killed_run

SMALL = (
    "model.n_layer=2",
    "model.n_embd=48",
    "model.intermediate_size=96",
    "train.seq_length=64",
    "logging.tensorboard=false",
)
LAST = "checkpoints/iter_0000100"


WITHOUT_PICTURES = """
import sys
from pathlib import Path

sys.modules.update(matplotlib=None, bokeh=None)
from scripts import demo

unbroken, killed, picture = map(Path, sys.argv[1:])
sys.exit(demo.compare_runs(unbroken, killed, 3, picture))
"""


def test_the_demo_needs_no_package_that_draws(tmp_path: Path) -> None:
    runs = twice_killed_run(tmp_path / "a"), twice_killed_run(tmp_path / "b")
    log = runs[1] / "metrics.jsonl"
    log.write_text(log.read_text().replace('"loss"', '"resumed": true, "loss"', 1))
    words = [sys.executable, "-c", WITHOUT_PICTURES, *map(str, runs), str(tmp_path / "overlay.png")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    lines = ended.stdout.splitlines()
    for line, name, package in zip(lines, ("overlay.png", "report.html"), ("matplotlib", "bokeh"), strict=False):
        assert line.startswith(f"did not write {tmp_path}/{name}: ")
        assert f"pip install {package}" in line
    assert lines[-1].startswith("bit-identical: ")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_the_demo_ends_with_equal_bits_on_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "demo"
    assert demo.main(["--folder", str(folder), *SMALL]) == 0
    text = capfd.readouterr().out
    assert text.endswith("\nbit-identical: 100/100 iterations\n")
    assert (
        "parallel.tensor_model_parallel_size: saved 1, now 2; weights and moments stay bitwise, and so does the "
        "loss curve: same bits" in text
    )
    assert (
        "topology.dp: saved 1, now 2; weights and moments stay bitwise, and so does the loss curve: same bits" in text
    )
    unbroken, killed = folder / "unbroken", folder / "killed"
    states = [json.loads((run / LAST / "trainer_state.json").read_text()) for run in (unbroken, killed)]
    assert [state["topology"]["dp"] for state in states] == [1, 2]
    assert curve(killed) == curve(unbroken)
    assert tensor_files(killed / LAST) == tensor_files(unbroken / LAST)
    assert (folder / "overlay.png").stat().st_size > 0
    assert "Differences from unbroken" in (folder / "report.html").read_text()
