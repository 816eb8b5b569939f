"""A checkpoint as nanoGPT writes it is imported in each of its versions, and a run continues with its own losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.errors import TrainerError
from tests.harness import compose
from tests.interop.states import ALONE, assert_carried, opened, random_state, replace_file, write_nanogpt
from tests.messages import Printed, refused
from trainer.commands import convert
from trainer.interop.source import StateSource

# Eleven layers, of which the names in order put 10 before 2.
SIZES = ["model.n_layer=11", "model.n_head=2", "model.n_embd=8", "model.intermediate_size=32", "model.vocab_size=260"]
ENDS = ["model.bos_token_id=259", "model.eos_token_id=259"]
MODEL = ["model=gpt2_tiny", "model.activation=gelu", *ALONE, *SIZES, *ENDS]
STATE = random_state(compose(MODEL).model)


def without_biases(state: StateSource) -> StateSource:
    def read(name: str) -> torch.Tensor:
        return torch.zeros_like(state.read(name)) if name.endswith(".bias") else state.read(name)

    return replace(state, read=read)


@pytest.mark.parametrize("case", ["since May 2023", "before, by sorted names", "compiled, without biases"])
def test_every_version_of_nanogpt_is_carried(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    is_old, has_bias = case.startswith("before"), not case.startswith("compiled")
    state = STATE if has_bias else without_biases(STATE)
    write_nanogpt(tmp_path / "in", state, is_old=is_old, prefix="" if has_bias else "_orig_mod.")
    source = opened("nanogpt", tmp_path / "in", [])
    assert_carried(source, state)
    assert source.model.activation.value == ("gelu_tanh" if is_old else "gelu")
    assert replace(source.model, activation=state.model.activation) == state.model
    assert ("67 are zero, and a run trains them" in caplog.text) is not has_bias
    caplog.clear()
    opened("nanogpt", tmp_path / "in", ["train.freeze=['*.bias']"])
    assert "a run trains them" not in caplog.text


def test_weights_alone_need_no_optimizer_of_nanogpt(tmp_path: Path) -> None:
    groups = {"state": {}, "param_groups": [{"params": list(range(5))}]}
    write_nanogpt(tmp_path / "in", STATE, optimizer=groups)
    with refused(TrainerError, "--weights-only"):
        opened("nanogpt", tmp_path / "in", [])
    source = opened("nanogpt", tmp_path / "in", [], weights_only=True)
    assert not source.has_optimizer
    assert_carried(source, STATE)


MLP = "transformer.h.1.mlp.c_fc"
Change = Callable[[dict[str, Any]], object]
REFUSED: dict[str, tuple[Change, str]] = {
    "no step yet": (lambda t: t["optimizer"]["state"].clear(), "transformer.wte.weight"),
    "a moment of another shape": (
        lambda t: t["optimizer"]["state"][3].update(exp_avg=torch.zeros(7)),
        "transformer.h.0.attn.c_proj.weight",
    ),
    "a number that is a tensor": (
        lambda t: t["optimizer"]["param_groups"][0]["params"].__setitem__(1, torch.arange(2)),
        "transformer.wpe.weight",
    ),
    "two steps": (lambda t: t["optimizer"]["state"][3].update(step=torch.tensor(2.0)), "[2.0, 3.0]"),
    "a derived model": (lambda t: t["model_args"].update(use_softermax=True), "use_softermax=True"),
    "a missing tensor": (lambda t: t["model"].pop(f"{MLP}.weight"), f"{MLP}.weight"),
    "RMSNorm": (
        lambda t: t["model"].update({"transformer.h.1.ln_1.gain": torch.ones(8)}),
        "transformer.h.1.ln_1.gain",
    ),
    "a quantized head": (lambda t: t["model"].update({"lm_head.weight": torch.zeros(3, dtype=torch.int8)}), "lm_head"),
    "one bias less": (lambda t: t["model"].pop(f"{MLP}.bias"), f"{MLP}.bias"),
    "no model of nanoGPT": (lambda t: t.update(model={"layers.0.weight": torch.zeros(3)}), "transformer.wte.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_nanogpts_own_is_refused_by_name(tmp_path: Path, case: str) -> None:
    change, named = REFUSED[case]
    replace_file(write_nanogpt(tmp_path / "in", STATE) / "ckpt.pt", change)
    with refused(TrainerError, named):
        opened("nanogpt", tmp_path / "in", [])


def test_impossible_heads_are_refused(tmp_path: Path, capsys: Printed) -> None:
    replace_file(write_nanogpt(tmp_path / "in", STATE) / "ckpt.pt", lambda t: t["model_args"].update(n_head=3))
    assert convert.main(["import", "nanogpt", str(tmp_path / "in"), str(tmp_path / "out"), "--trust-pickle"]) == 2
    assert "model.n_head=3: must divide model.n_embd=8" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
