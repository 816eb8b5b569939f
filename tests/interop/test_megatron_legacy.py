"""Checkpoints of Megatron-LM's format `torch`: what does not fit together is named."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.errors import TrainerError
from tests.interop import megatron_layout
from tests.interop.megatron_layout import Way, drift_ranks, write
from tests.interop.states import ALONE, ENDS, assert_carried, opened, read_all, replace_file, state_of
from tests.messages import refused

OURS = [*ALONE, *ENDS]
STATE = state_of("gpt2")


@pytest.mark.parametrize(("names", "expected"), [("newer", "gelu_tanh"), ("local", "gelu")])
def test_openai_gelu_is_that_of_megatron_lm_s_own_models(tmp_path: Path, names: str, expected: str) -> None:
    path = write(tmp_path, STATE, Way(names=names), openai_gelu=True, bias_gelu_fusion=False)
    assert opened("megatron", path, OURS).model.activation.value == expected


def drift(saved: dict[Any, Any]) -> None:
    saved["model"]["decoder.layers.0.self_attention.linear_proj.bias"][3] += 1


def swap(saved: dict[Any, Any]) -> None:
    names = [f"decoder.layers.{layer}.self_attention.linear_proj.weight" for layer in (0, 1)]
    model = saved["model"]
    model[names[0]], model[names[1]] = model[names[1]], model[names[0]]


def narrow(saved: dict[Any, Any]) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    saved["model"][name] = saved["model"][name][:, :1].clone()


def move(saved: dict[Any, Any]) -> None:
    flat = next(iter(saved[0].values()))
    flat["param"] = flat["param"].roll(1)


def drop(saved: dict[Any, Any]) -> None:
    saved["model"].pop("decoder.layers.1.mlp.linear_fc1.bias")


def freeze(saved: dict[Any, Any]) -> None:
    saved["optimizer"]["param_groups"][0]["params"].pop()


def cut_state(saved: dict[Any, Any]) -> None:
    saved["optimizer"]["state"][2].pop("exp_avg_sq")


TP2, PP2 = Way(tp=2), Way(pp=2)
PLAIN = Way(is_distributed=False)
MODEL_FILE, FLAT_FILE = "mp_rank_00/model_optim_rng.pt", "mp_rank_00/distrib_optim.pt"
REFUSED: dict[str, tuple[Way, str, Callable[[dict[Any, Any]], object], str]] = {
    "a buffer of another save": (Way(), MODEL_FILE, swap, "linear_proj.weight"),
    "a buffer that is not aligned": (Way(), FLAT_FILE, move, FLAT_FILE),
    "a rank's part of another save": (
        replace(TP2, is_distributed=False),
        "mp_rank_01/model_optim_rng.pt",
        narrow,
        "[48, 1] of torch.float32",
    ),
    "a missing parameter": (PLAIN, MODEL_FILE, drop, "linear_fc1.bias"),
    "a frozen parameter": (PLAIN, MODEL_FILE, freeze, "18 and 34"),
    "a lacking moment": (PLAIN, MODEL_FILE, cut_state, "exp_avg_sq"),
    "another save": (TP2, "mp_rank_01/model_optim_rng.pt", lambda s: s.update(iteration=2), "[2, 3.0"),
    "another version": (TP2, MODEL_FILE, lambda s: s.update(checkpoint_version=2.0), "2.0"),
    "an older version": (PLAIN, MODEL_FILE, lambda s: s.update(checkpoint_version=1.0), "1.0"),
    "no arguments": (Way(), MODEL_FILE, lambda s: s.pop("args"), "position_embedding_type"),
    "an optimizer that is chained": (Way(), MODEL_FILE, lambda s: s.update(optimizer=[{}]), "list"),
    "two steps": (
        PLAIN,
        MODEL_FILE,
        lambda s: s["optimizer"]["state"][0].update(step=torch.tensor(2.0)),
        "[2.0, 3.0]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_together_is_refused_by_name(tmp_path: Path, case: str) -> None:
    way, file, alter, named = REFUSED[case]
    path = write(tmp_path, STATE, way)
    replace_file(path / file, alter)
    with refused(TrainerError, named):
        read_all(opened("megatron", path, OURS))


DRIFTED: dict[str, tuple[Way, str, Callable[[dict[Any, Any]], object], str]] = {
    "a bias": (replace(TP2, is_distributed=False), "mp_rank_01/model_optim_rng.pt", drift, "linear_proj.bias"),
    "a tied copy": (
        replace(PP2, is_distributed=False),
        "mp_rank_00_001/model_optim_rng.pt",
        lambda s: s["model"]["output_layer.weight"].mul_(2),
        "word_embeddings",
    ),
}


@pytest.mark.parametrize("case", DRIFTED)
def test_the_first_of_copies_that_drifted_apart_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    way, file, alter, named = DRIFTED[case]
    path = write(tmp_path, STATE, way)
    replace_file(path / file, alter)
    assert_carried(opened("megatron", path, OURS), STATE)
    assert sum(named in line for line in caplog.messages) == 1


def test_the_first_of_copies_in_a_buffer_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drift_ranks(monkeypatch, megatron_layout)
    path = write(tmp_path / "flat", STATE, replace(TP2, rows=264))
    assert_carried(opened("megatron", path, OURS), STATE)


def test_classes_registered_with_torch_change_nothing(tmp_path: Path) -> None:
    """`import megatron.core` registers the class of its arguments with torch, for the whole process."""
    path = write(tmp_path, STATE, Way(rows=264))
    with torch.serialization.safe_globals([Namespace]):
        registered = set(torch.serialization.get_safe_globals())
        assert opened("megatron", path, OURS).model == STATE.model
        assert set(torch.serialization.get_safe_globals()) == registered


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, STATE, Way(tp=2, pp=2, dp=2, rows=264))
    shutil.rmtree(path / "mp_rank_01_001")
    with refused(TrainerError, "mp_rank_01_001"):
        opened("megatron", path, OURS)
    file = path / "mp_rank_00_000/model_optim_rng.pt"
    replace_file(file, lambda table: setattr(table["args"], "tensor_model_parallel_size", 1 << 62))
    with pytest.raises(TrainerError, match="mp_rank_06_000"):
        opened("megatron", path, OURS)
