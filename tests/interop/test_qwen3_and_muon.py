"""Conversions of Qwen3 and of Muon's state: those that work, and the refusals of those that other formats lack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reprise.errors import ConfigError, MismatchError
from reprise.files import Files
from reprise.reading import Checkpoint, open_checkpoint
from tests.harness import TINY, compose
from trainer.commands import convert
from trainer.config.optimizer import OptimizerName
from trainer.interop.dcp import export as dcp_export
from trainer.interop.formats import ExportOptions
from trainer.interop.output import write_checkpoint
from trainer.interop.source import StateSource, of_checkpoint
from trainer.optim.table import state_tensors
from trainer.run.state import checkpoint_specs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STEPS = 3
OVERRIDES = ["model=qwen3_tiny", *TINY]
CONFIG = compose(OVERRIDES)
SHAPES = {spec.name: spec.shape for spec in checkpoint_specs(CONFIG.model, OptimizerName.adamw)}


def source() -> StateSource:
    """Return a state of AdamW with random numbers, positive for the sake of second moments."""
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}
    values |= {name: torch.tensor(float(STEPS)) for name in values if name.startswith("step.")}
    return StateSource(CONFIG.model, STEPS, has_optimizer=True, read=values.__getitem__)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_checkpoint(source(), tmp_path / "run/checkpoints", CONFIG), Files())


def assert_carried(found: StateSource, names: list[str]) -> None:
    expected = source()
    for name in names:
        assert torch.equal(found.read(name), expected.read(name)), name


def test_qwen3_goes_out_to_dcp_and_comes_back_bit_for_bit(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert convert.main(["export", "dcp", str(checkpoint.path), str(out)]) == 0
    again = ["import", "dcp", str(out), str(tmp_path / "again"), "--trust-pickle", *OVERRIDES]
    assert convert.main(again) == 0
    found = of_checkpoint(open_checkpoint(tmp_path / f"again/iter_{STEPS:07d}", Files()))
    assert found.model == CONFIG.model
    assert_carried(found, list(SHAPES))


def test_qwen3_has_no_file_of_llmc(checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(["export", "llmc", str(checkpoint.path), str(tmp_path / "out.bin")]) == 2
    assert "model.family=qwen3: llm.c has gpt2 and llama3" in capsys.readouterr().err
    assert not (tmp_path / "out.bin").exists()


def test_the_state_of_muon_is_not_exported_to_dcp(checkpoint: Checkpoint, tmp_path: Path) -> None:
    state = {**checkpoint.state, "optimizer": {"name": "Muon", "groups": []}}
    with pytest.raises(MismatchError, match="Only the state of AdamW is exported to DCP") as caught:
        dcp_export.write(replace(checkpoint, state=state), tmp_path / "out", ExportOptions())
    assert caught.value.found == "Muon"
    assert not (tmp_path / "out").exists()


def test_moments_of_adamw_do_not_continue_under_muon(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="The source holds the state of AdamW") as caught:
        write_checkpoint(source(), tmp_path / "run", compose([*OVERRIDES, "optimizer=muon"]))
    assert "--weights-only" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_weights_alone_start_a_run_of_muon(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out, muon = tmp_path / "out", [*OVERRIDES, "optimizer=muon"]
    assert convert.main(["export", "dcp", str(checkpoint.path), str(out)]) == 0
    command = ["import", "dcp", str(out), str(tmp_path / "again"), "--trust-pickle"]
    assert convert.main([*command, *muon]) == 2
    assert convert.main([*command, "--weights-only", *muon]) == 0
    found = open_checkpoint(tmp_path / "again/iter_0000000", Files())
    assert (found.has_optimizer, found.state["optimizer"]["name"]) == (False, "Muon")
    state = {tensor.name for tensor in state_tensors(OptimizerName.adamw, CONFIG.model)}
    assert_carried(of_checkpoint(found), [name for name in SHAPES if name not in state])
