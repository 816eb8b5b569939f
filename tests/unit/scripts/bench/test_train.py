"""The benchmark of training runs beside transformers, on the same values."""

from __future__ import annotations

import json
import multiprocessing

import pytest
import torch

from scripts.bench import train as bench_train
from scripts.bench.train import Measured, StepCost


@pytest.mark.nightly
def test_training_is_measured_beside_transformers_on_one_state(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    arguments = ["tiny", "--rounds", "2", "--threads", str(threads), "--pad-vocab-multiple", "100", "--json"]
    assert bench_train.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["threads"], found["padded_vocab"]) == (threads, 100)
    assert found["tokens_per_s"].keys() == found["loss"].keys() == {"reprise", "transformers", bench_train.EAGER}
    assert all(rate > 0 for rate in found["tokens_per_s"].values())
    assert found["first_loss"]["reprise"] == pytest.approx(found["first_loss"]["transformers"], abs=1e-5)
    # The same parameters decay, so that the curves stay together.
    assert found["loss"]["reprise"] == pytest.approx(found["loss"]["transformers"], abs=1e-3)
    assert all(step["faults"] >= 0 and step["allocated_mb"] > 0 for step in found["step"].values())
    shown = bench_train.table(found, {bench_train.OURS: [200.0, 300.0], bench_train.THEIRS: [100.0, 200.0]})
    assert shown.startswith("tiny: device ")
    assert "padded_vocab 100" in shown
    assert "reprise is 1.750 times as fast" in shown


def test_sides_that_disagree_end_with_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = StepCost(0.0, 0.0, 1.0)
    sides = (bench_train.OURS, bench_train.THEIRS, bench_train.EAGER)

    def measured(loss: float) -> Measured:
        losses = dict(zip(sides, (4.0, 4.0, loss), strict=True))
        rates, costs = {side: [100.0] for side in sides}, {side: [cost] for side in sides}
        return Measured(rates, costs, losses, losses, {"device": "cpu", "threads": 1})

    for loss, status, words in ((4.000009, 0, "agree"), (4.0001, 1, "DIFFER"), (float("nan"), 1, "DIFFER")):
        monkeypatch.setattr(bench_train, "measure", lambda name, options, loss=loss: measured(loss))
        assert bench_train.main(["tiny", "--rounds", "1"]) == status
        assert f"losses of the first step {words}" in capsys.readouterr().out


def test_training_is_not_measured_at_unknown_sizes_or_one_sided(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_train.main(["tiny", "huge"])
    assert "'huge' is none of small, gpt2_124m, tiny" in capsys.readouterr().err
    before = set(multiprocessing.active_children())  # of other tests of this process
    # No such embedding can be built, so that the first process to be heard ends.
    with pytest.raises(SystemExit, match="the process of reprise ended, status 1"):
        bench_train.main(["tiny", "--rounds", "1", "--dropout", "2"])
    assert set(multiprocessing.active_children()) <= before
