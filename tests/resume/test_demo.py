"""`make demo`, with a smaller model: killed on one rank, resumed on two of each kind, the run has the same bits."""

from __future__ import annotations

import json
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


def test_the_demo_needs_no_package_that_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    unbroken, killed = twice_killed_run(tmp_path / "a"), twice_killed_run(tmp_path / "b")
    for name in ("matplotlib", "bokeh"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert demo.compare_runs(unbroken, killed) == 0
    printed = capfd.readouterr()
    assert "pip install matplotlib" in printed.err
    assert "pip install bokeh" in printed.err
    assert printed.out.splitlines()[-1].startswith("bit-identical: ")
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
