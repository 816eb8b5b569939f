"""What every export keeps: it comes back bit for bit, replaces nothing, and leaves nothing where it fails."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from reprise.errors import ConfigError, MismatchError
from reprise.loading import open_checkpoint
from reprise.storage import Files
from tests.harness import all_files, compose, tensor_files
from tests.interop import states
from tests.interop.states import ALONE, ENDS, assert_carried, opened, overrides_of, state_of
from tests.messages import refused
from trainer.commands import checkpoint as look
from trainer.commands import convert
from trainer.interop.formats import ExportOptions
from trainer.interop.output import write_checkpoint
from trainer.interop.source import StateSource, of_checkpoint
from trainer.interop.table import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def made(folder: Path, family: str, state: StateSource | None = None, *overrides: str) -> Path:
    """Write a checkpoint of ours and return its folder."""
    config = compose([*overrides_of(family), *overrides])
    return write_checkpoint(state or state_of(family), folder, config, consumed_samples=31)


def export(program: str, source: Path, out: Path, *more: str) -> int:
    return convert.main(["export", program, str(source), str(out), *more])


@pytest.mark.parametrize(
    ("program", "family"),
    [
        ("hf", "gpt2 exact"),
        ("megatron", "qwen3"),
        pytest.param("hf", "qwen3", marks=pytest.mark.slow),
        pytest.param("megatron", "gpt2", marks=pytest.mark.slow),
        pytest.param("megatron", "llama tied", marks=pytest.mark.slow),
    ],
)
def test_an_export_comes_back_bit_for_bit(tmp_path: Path, program: str, family: str) -> None:
    source = made(tmp_path / "made", family)
    assert export(program, source, tmp_path / "out") == 0
    back = ["import", program, str(tmp_path / "out"), str(tmp_path / "back"), "--trust-pickle", *ENDS, *ALONE]
    assert convert.main(back) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "made", "out"]
    (found,) = (tmp_path / "back").glob("iter_*")
    assert look.main(["verify", str(found)]) == 0
    expected = tensor_files(source)
    if program == "megatron":
        assert tensor_files(found) == expected
        assert open_checkpoint(found, Files()).state["consumed_samples"] == 31
    else:
        assert_carried(of_checkpoint(open_checkpoint(found, Files())), state_of(family))


@pytest.mark.parametrize("program", ["dcp", pytest.param("megatron", marks=pytest.mark.slow)])
def test_bfloat16_moments_leave_and_return(tmp_path: Path, program: str) -> None:
    key, name = "optimizer.moments_dtype=bfloat16", "exp_avg_sq.transformer.h.1.ln_1.bias"
    source = made(tmp_path / "made", "gpt2", None, key)
    assert export(program, source, tmp_path / "out") == 0
    back = ["import", program, str(tmp_path / "out"), str(tmp_path / "back"), "--trust-pickle", *ENDS, *ALONE]
    assert convert.main([*back, key]) == 0
    (found,) = (tmp_path / "back").glob("iter_*")
    assert tensor_files(found) == tensor_files(source)
    moment = of_checkpoint(open_checkpoint(found, Files())).read(name)
    torch.testing.assert_close(moment, state_of("gpt2").read(name).bfloat16(), rtol=0, atol=0)


def test_the_trainer_gets_bfloat16_moments_in_float32(tmp_path: Path) -> None:
    source = made(tmp_path / "made", "gpt2", None, "optimizer.moments_dtype=bfloat16")
    assert export("trainer", source, tmp_path / "checkpoint-3") == 0
    entries = torch.load(tmp_path / "checkpoint-3/optimizer.pt")["state"].values()
    assert {value.dtype for entry in entries for value in entry.values()} == {torch.float32}


@pytest.mark.parametrize("program", states.cases("hf, dcp", "megatron"))
def test_an_export_replaces_nothing_and_fails_cleanly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str
) -> None:
    source = made(tmp_path / "made", "gpt2")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").touch()
    before, new = all_files(tmp_path), tmp_path / "new"
    cases = {
        str(tmp_path / "out"): (source, tmp_path / "out"),
        str(tmp_path / "none"): (source, tmp_path / "none/new"),
        "holds no checkpoint": (tmp_path / "out", new),
    }
    if program != "hf":
        with pytest.raises(SystemExit):
            export(program, source, new, "--dtype", "float16")
        assert "--dtype" in capsys.readouterr().err
    for named, (path, out) in cases.items():
        assert export(program, path, out) == 2
        assert named in capsys.readouterr().err
        assert all_files(tmp_path) == before
    file = next(source.glob("model*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert export(program, source, new) == 2
    assert f"A tensor is damaged ({file}" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "out"]


@pytest.mark.parametrize("program", ["dcp", "megatron"])
def test_an_export_of_weights_alone_has_no_optimizer(tmp_path: Path, program: str) -> None:
    state = replace(state_of("llama"), has_optimizer=False, iteration=0)
    assert export(program, made(tmp_path / "made", "llama", state), tmp_path / "out") == 0
    folder = tmp_path / "out" / ("iter_0000000" if program == "megatron" else "")
    keys = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert not any(key.startswith("optim") for key in keys)
    assert_carried(opened(program, tmp_path / "out", overrides_of("llama")), state)


# ---- Megatron


def test_an_export_has_the_arguments_that_megatron_compares(tmp_path: Path) -> None:
    """`check_checkpoint_args` of `megatron/training/checkpointing.py`, with --vocab-file of GPT-2's vocabulary."""
    assert export("megatron", made(tmp_path / "made", "gpt2"), tmp_path / "out") == 0
    args = torch.load(tmp_path / "out/iter_0000003/common.pt", weights_only=False)["args"]
    expected = {
        "num_layers": 4,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "add_position_embedding": True,
        "max_position_embeddings": 256,
        "make_vocab_size_divisible_by": 128,
        "tokenizer_type": "GPT2BPETokenizer",
    }
    assert {name: getattr(args, name) for name in expected} == expected


def test_a_terminal_shows_the_progress_of_a_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made(tmp_path / "made", "gpt2")
    assert "B/s" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert export("megatron", source, tmp_path / "out") == 0
    assert re.search(r"iter_0000003: +0%.*/\d+.*B/s", capsys.readouterr().err)
    assert convert.main(["import", "megatron", str(tmp_path / "out"), str(tmp_path / "back"), "--trust-pickle"]) == 0
    assert re.search(r"iter_0000003.*: +0%.*/\d+.*B/s", capsys.readouterr().err)


def test_an_export_has_the_steps_of_the_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They need not be the iteration: another program counted them, or some parameters were frozen at first."""
    state = state_of("gpt2")
    steps = {"step.transformer.wte.weight": torch.tensor(2.0)}
    others = replace(state, read=lambda n: steps.get(n, torch.tensor(5.0)) if n.startswith("step.") else state.read(n))
    assert export("megatron", made(tmp_path / "made", "gpt2", others), tmp_path / "out") == 0
    assert "step counts differ, [2.0, 5.0]" in caplog.text
    back = opened("megatron", tmp_path / "out", [*ENDS, *ALONE])
    assert (back.iteration, back.read("step.transformer.wpe.weight")) == (3, 5.0)


# ---- what a format does not have


def test_the_state_of_muon_is_neither_exported_nor_continued(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(made(tmp_path / "made", "qwen3"), Files())
    muon = replace(checkpoint, state={**checkpoint.state, "optimizer": {"name": "Muon", "groups": []}})
    write = FORMATS["dcp"].write
    assert write is not None
    with refused(MismatchError, "Muon"):
        write(muon, tmp_path / "out", ExportOptions())
    overrides = [*overrides_of("qwen3"), "optimizer=muon"]
    with refused(ConfigError, "optimizer=adamw", "--weights-only"):
        write_checkpoint(state_of("qwen3"), tmp_path / "run", compose(overrides))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made"]
    assert export("dcp", checkpoint.path, tmp_path / "out") == 0
    command = ["import", "dcp", str(tmp_path / "out"), str(tmp_path / "again"), "--trust-pickle", *overrides]
    assert convert.main([*command, "--weights-only"]) == 0
    found = open_checkpoint(tmp_path / "again/iter_0000000", Files())
    assert found.state["optimizer"]["name"] == "Muon"
    assert_carried(of_checkpoint(found), state_of("qwen3"))
