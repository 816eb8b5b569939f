"""Checkpoints of megatron-core's `torch_dist`: what their arguments say, what is refused, and what goes out."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from models.config import Activation, Family, RopeScaling
from models.families import stored_tensors
from reprise.errors import CheckpointError, MismatchError
from tests.harness import compose
from tests.interop import states, torch_dist_layout
from tests.interop.megatron_layout import Way, _args, drift_ranks
from tests.interop.states import ALONE, ENDS, assert_carried, random_state, state_of
from tests.interop.torch_dist_layout import Form, write
from tests.messages import refused
from trainer.commands import convert
from trainer.interop.formats import ImportOptions
from trainer.interop.megatron.arguments import DescribedModel, describe
from trainer.interop.megatron.shards import join
from trainer.interop.source import StateSource
from trainer.interop.stored import FileTensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

BF16 = torch.bfloat16
HYBRID = {"num_layers": 8, "hybrid_layer_pattern": "*-*-|*-*-", "is_hybrid_model": True}


def opened(path: Path, *overrides: str, **options: Any) -> StateSource:
    return states.opened("megatron", path, list(overrides or (*ENDS, *ALONE)), **options)


@pytest.mark.parametrize(
    "args",
    [
        {"hybrid_layer_pattern": "M*-M*-M*-M*-"},
        {"hybrid_layer_pattern": "*-*-*-*-/*-"},
        {"hybrid_layer_pattern": None, "hybrid_override_pattern": "*E*E*E*E"},
        {"hybrid_layer_pattern": "-*-*-*-*"},
        {"num_experts": 8},
    ],
)
def test_other_patterns_of_a_hybrid_model_are_refused(tmp_path: Path, args: Mapping[str, Any]) -> None:
    path = write(tmp_path, state_of("llama"), Way(), Form("weights", is_hybrid=True), **{**HYBRID, **args})
    with refused(MismatchError, *(str(value) for value in args.values() if value is not None)):
        opened(path)


def test_tensors_of_a_hybrid_model_tell_its_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with each MLP before its attention has tensors of the same shapes."""
    of_hybrid = torch_dist_layout._of_hybrid

    def swapped(name: str) -> str:
        words = of_hybrid(name).split(".")
        return ".".join([*words[:2], str(int(words[2]) ^ 1), *words[3:]] if words[1] == "layers" else words)

    monkeypatch.setattr(torch_dist_layout, "_of_hybrid", swapped)
    silent = dict.fromkeys(HYBRID, None)
    path = write(tmp_path, state_of("llama"), Way(), Form("weights", is_hybrid=True), **{**silent, "num_layers": 8})
    with refused(MismatchError, "missing: decoder.layers.0.self_attention"):
        opened(path)


# ---- weights and moments of two saves


def _metadata(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())  # noqa: S301


def _replace_weights(path: Path, others: Path) -> None:
    """Let the metadata of a folder name the weights of another one."""
    ours, theirs = (_metadata(p) for p in (path, others))
    for index, info in theirs.storage_data.items():
        if index.fqn in theirs.state_dict_metadata and not index.fqn.startswith(("optimizer.", "rng")):
            moved = f"__9_{info.relative_path[2:]}"
            shutil.copy(others / info.relative_path, path / moved)
            ours.storage_data[index] = replace(info, relative_path=moved)
    (path / ".metadata").write_bytes(pickle.dumps(ours))


@pytest.mark.parametrize("kind", states.cases("buckets, plain", "fully, flat"))
def test_an_optimizer_of_another_save_is_refused(tmp_path: Path, kind: str) -> None:
    name, state = "transformer.h.1.mlp.c_fc.weight", state_of("gpt2")
    mixed = replace(state, read=lambda n: state.read(n) + (n == name))
    way = Way(dtype=BF16, dp=2)
    path = write(tmp_path / "saved", state, way, Form(kind))
    _replace_weights(path, write(tmp_path / "mixed", mixed, way, Form("weights")))
    with refused(CheckpointError, "decoder.layers.1.mlp.linear_fc1.weight"):
        opened(path).read(name)


def test_buckets_that_no_known_order_explains_are_refused(tmp_path: Path) -> None:
    other = state_of("gpt2", 2)
    path = write(tmp_path / "saved", state_of("gpt2"), Way(dp=2), Form("buckets"))
    _replace_weights(path, write(tmp_path / "other", other, Way(), Form("weights")))
    with refused(CheckpointError, str(path), "at any expected position"):
        opened(path)
    assert_carried(opened(path, weights_only=True), other)


def test_the_first_of_copies_in_buckets_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drift_ranks(monkeypatch, torch_dist_layout)
    state = state_of("gpt2")
    path = write(tmp_path, state, Way(tp=2, dp=2, rows=264), Form("buckets"))
    assert_carried(opened(path), state)
    assert sum("linear_proj.bias" in line for line in caplog.messages) == 3 * 4  # three kinds of four biases


def test_moments_that_are_integers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chunks = torch_dist_layout._bucket_chunks

    def rounded(*args: Any) -> Iterator[tuple[str, Any]]:
        for key, (shape, parts) in write_chunks(*args):
            is_moment = key.endswith(".exp_avg")
            yield key, (shape, {at: part.int() if is_moment else part for at, part in parts.items()})

    monkeypatch.setattr(torch_dist_layout, "_bucket_chunks", rounded)
    path = write(tmp_path, state_of("gpt2"), Way(), Form("buckets"))
    with pytest.raises(MismatchError, match="int32"):
        opened(path)


# ---- values that are not tensors


class _Inert:
    """An object of a class that nothing knows, with attributes named as those of its placeholder."""

    def __init__(self) -> None:
        self.__dict__.update(values=1, attributes=2, __class__=3)


def _replace_value(path: Path, key: str, value: object) -> None:
    """Let the metadata of a folder name another value that is not a tensor."""
    metadata, index = _metadata(path), dcp.metadata.MetadataIndex(key)
    torch.save(value, path / "__9_0.distcp")
    length = (path / "__9_0.distcp").stat().st_size
    metadata.storage_data[index] = replace(
        metadata.storage_data[index], relative_path="__9_0.distcp", offset=0, length=length
    )
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_common_state_of_another_form_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, state_of("gpt2"), Way(), Form("weights", has_file=False))
    _replace_value(path, "common_state/shard_0_1", [None])
    with refused(CheckpointError, str(path)):
        opened(path)


def test_metadata_changes_no_class_of_this_process(tmp_path: Path) -> None:
    path = write(tmp_path, state_of("gpt2"), Way(), Form())
    name = b"X\x07\0\0\0planted"
    # The class itself on the stack, and then the state (None, {"planted": "planted"}) set on it.
    (path / ".metadata").write_bytes(b"\x80\x02cpathlib\nPosixPath\nN}" + name * 2 + b"s\x86b.")
    try:
        with refused(CheckpointError, ".metadata"):
            opened(path)
        assert not hasattr(tmp_path, "planted")
    finally:
        if hasattr(PurePath, "planted"):
            del PurePath.planted


def test_objects_of_unknown_classes_are_left_alone(tmp_path: Path) -> None:
    state, form = state_of("gpt2"), Form(has_file=False)
    path = write(tmp_path, state, Way(), form, hook=_Inert(), other=argparse.Namespace(values=1))
    assert_carried(opened(path), state)


# ---- what is not there, or of another model


@pytest.mark.parametrize("text", ["4", "", "../../etc", "release"])
def test_a_tracker_without_its_folder_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, state_of("gpt2"), Way(), Form())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with refused(CheckpointError, str(tmp_path)):
        opened(tmp_path)


def test_other_backends_and_folders_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, state_of("gpt2"), Way(), Form())
    (path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with refused(MismatchError, "sharded_backend", "torch_dist", "zarr"):
        opened(path)
    (tmp_path / "empty").mkdir()
    with refused(MismatchError, "empty", "metadata.json"):
        opened(tmp_path / "empty")


def test_another_model_than_the_arguments_say_is_listed(tmp_path: Path) -> None:
    path = write(tmp_path, state_of("gpt2"), Way(), Form(), num_layers=3, ffn_hidden_size=48)
    with refused(MismatchError, "decoder.layers.0.mlp.linear_fc1.weight", "[96, 24]", "[48, 24]"):
        opened(path)
    path = write(tmp_path / "tied", state_of("llama"), Way(), Form(), untie_embeddings_and_output_weights=False)
    with refused(MismatchError, "output_layer.weight"):
        opened(path)


def test_a_group_gives_what_arguments_lack_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "megatron", state_of("gpt2"), Way(), Form(), position_embedding_type=None)
    command = ["import", "megatron", str(path), str(tmp_path / "ours"), "--trust-pickle", *ALONE]
    assert convert.main(command) == 2  # neither GPT-2 nor LLaMA-3
    assert convert.main([*command, "model=gpt2_tiny", "model.n_layer=3"]) == 2
    assert "model.KEY=VALUE" in capsys.readouterr().err
    assert convert.main([*command, "model=gpt2_tiny"]) == 0
    saved = json.loads((tmp_path / "ours/iter_0000003/trainer_state.json").read_text())
    assert (saved["model"]["n_embd"], saved["consumed_samples"]) == (24, 36)


def test_padded_rows_are_cut_or_kept_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of("gpt2")
    path = write(tmp_path, state, Way(rows=264), Form())
    assert opened(path).model.vocab_size == 257
    assert "model.vocab_size=264 keeps them" in caplog.text
    kept = opened(path, "model.vocab_size=264", *ALONE)
    assert kept.read("exp_avg.transformer.wte.weight").shape == (264, 24)
    assert torch.equal(kept.read("transformer.wte.weight")[:257], state.read("transformer.wte.weight"))
    bare = write(tmp_path / "bare", state, Way(rows=264), Form(), vocab_size=None)
    assert opened(bare).model.vocab_size == 264


@pytest.mark.parametrize("form", [Form(), Form("weights", is_hybrid=True)], ids=["layers", "hybrid"])
def test_a_norm_stored_minus_one_gets_it_back(tmp_path: Path, form: Form) -> None:
    state, hybrid = state_of("llama"), HYBRID if form.is_hybrid else {}
    path = write(tmp_path, state, Way(), form, apply_layernorm_1p=True, **hybrid)
    norms = {name: state.read(name) + 1 for name in stored_tensors(state.model) if "norm" in name}
    shifted = replace(state, read=lambda name: norms[name] if name in norms else state.read(name))
    assert_carried(opened(path, weights_only=form.is_hybrid), shifted)


# ---- memory


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fully", "buckets"])
def test_a_conversion_holds_three_times_the_largest_tensor(tmp_path: Path, kind: str) -> None:
    sizes = ["model.n_layer=1", "model.n_head=4", "model.n_kv_head=4", "model.n_embd=128", "model.intermediate_size=8"]
    ends = ["model.vocab_size=65536", "model.bos_token_id=0", "model.eos_token_id=0"]
    model = compose(["model=llama3_tiny", *ALONE, *sizes, *ends, "model.tie_word_embeddings=true"]).model
    largest = max(prod(stored.shape) for stored in stored_tensors(model).values()) * 4
    write(tmp_path / "saved", random_state(model), Way(), Form(kind))
    arguments = ["import", "megatron", str(tmp_path / "saved"), str(tmp_path / "new"), "--trust-pickle"]
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, see proc(5)
    assert convert.main([*arguments, *ALONE, *ends[1:]]) == 0
    assert _resident("VmHWM") - before <= 3 * largest


@pytest.mark.parametrize("is_gated", [False, True])
def test_parts_are_joined_with_one_in_memory_beside_the_whole(is_gated: bool) -> None:
    alive = list[weakref.ref[Any]]()

    def read(rank: int) -> torch.Tensor:
        assert not any(one() is not None for one in alive)
        values = np.arange(12 * rank, 12 * rank + 12, dtype=np.float32).reshape(4, 3)
        alive.append(weakref.ref(values))
        return torch.from_numpy(values)

    pieces = [FileTensor((4, 3), torch.float32, partial(read, rank)) for rank in range(3)]
    joined = join(pieces, cut=0, is_gated=is_gated, where="here")
    rows = torch.arange(36.0).reshape(12, 3)
    expected = rows.reshape(3, 2, 2, 3).transpose(0, 1).reshape(12, 3) if is_gated else rows
    assert torch.equal(joined, expected)


def _resident(kind: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024


HEADS = {"kv_channels": 6, "num_query_groups": 1, "group_query_attention": False}
GPT2_ARGS = vars(_args(state_of("gpt2"), Way(), HEADS))
LLAMA_ARGS = vars(_args(state_of("llama"), Way(), {"kv_channels": 6}))


def described(args: dict[str, Any], *overrides: str, rows: int = 264) -> DescribedModel:
    return describe(args, rows, ImportOptions(compose([*overrides]), overrides=overrides), where="args")


def test_arguments_describe_the_model() -> None:
    gpt2 = described(GPT2_ARGS).model
    assert gpt2 == replace(state_of("gpt2").model, rope_theta=gpt2.rope_theta)
    assert described(GPT2_ARGS | {"bias_gelu_fusion": False}).model.activation is Activation.gelu
    assert described(GPT2_ARGS | {"hidden_dropout": 0.1}).model.dropout == 0.1
    llama = described(LLAMA_ARGS | {"use_rope_scaling": True, "rope_scaling_factor": 32.0, "init_method_std": 0.01})
    assert (llama.model.family, llama.model.n_kv_head, llama.model.tie_word_embeddings) == (Family.llama3, 2, False)
    assert llama.model.rope_scaling == RopeScaling(factor=32.0)
    assert (llama.model.rope_theta, llama.model.initializer_range) == (500000.0, 0.01)
    untied = {"untie_embeddings_and_output_weights": None}
    assert not described(LLAMA_ARGS | untied, "model.tie_word_embeddings=false").model.tie_word_embeddings
    assert described(LLAMA_ARGS | {"rotary_base": None}).model.rope_theta == 10000.0
    assert described(LLAMA_ARGS | {"qk_layernorm": True}).model.family is Family.qwen3


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (GPT2_ARGS | {"squared_relu": True}, "squared_relu=True"),
        (GPT2_ARGS | {"swiglu": True}, "swiglu=True"),
        (GPT2_ARGS | {"normalization": "RMSNorm"}, "normalization='RMSNorm'"),
        (GPT2_ARGS | {"num_experts": 8}, "num_experts=8"),
        (GPT2_ARGS | {"group_query_attention": True, "num_query_groups": 2}, "model.n_kv_head=2"),
        (GPT2_ARGS | {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        (LLAMA_ARGS | {"add_qkv_bias": True}, "add_qkv_bias=True"),
        (LLAMA_ARGS | {"kv_channels": 12}, "kv_channels=12"),
        (LLAMA_ARGS | {"rotary_percent": 0.5}, "rotary_percent=0.5"),
        ({}, "position_embedding_type"),
        ({}, "set model.n_layer"),
        (GPT2_ARGS | {"vocab_size": 300}, "vocab_size=300"),
        ({"position_embedding_type": "rope"}, "set model.n_head"),
    ],
)
def test_what_our_models_lack_is_refused_by_name(args: dict[str, Any], named: str) -> None:
    with refused(MismatchError, named):
        described(args)


def test_fields_that_arguments_lack_come_from_overrides() -> None:
    few = {"num_layers": 4, "hidden_size": 24, "vocab_size": 257}
    found = described(few, "model=gpt2_tiny", "model.intermediate_size=36")
    assert (found.model.n_layer, found.model.n_head, found.model.intermediate_size) == (4, 4, 36)
    assert any("model.n_head=4" in note and "model.activation=gelu_tanh" in note for note in found.notes)
    named = described(few, "model=gpt2_tiny", "model.intermediate_size=36", "model.n_head=4")
    assert not any("model.n_head" in note for note in named.notes)
