"""Checkpoints of megatron-core's `torch_dist` come in and go out bit for bit; hostile and damaged ones do not."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shutil
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from models.config import Activation, Family, ModelConfig, RopeScaling
from models.families import stored_tensors
from reprise.errors import CheckpointError, ConfigError, MismatchError, TrainerError
from tests.harness import TINY, compose, tensor_files
from tests.interop import torch_dist_layout
from tests.interop.megatron_layout import Way
from tests.interop.torch_dist_layout import Form, write
from trainer.commands import convert
from trainer.interop.formats import ImportOptions
from trainer.interop.megatron.arguments import DescribedModel, describe
from trainer.interop.megatron.hybrid import pattern_of
from trainer.interop.megatron.names import by_our_name, correspondences
from trainer.interop.megatron.shards import RankCopies, RankPiece, join
from trainer.interop.megatron.source import read_source
from trainer.interop.output import write_checkpoint
from trainer.interop.source import StateSource

BF16 = torch.bfloat16
SIZES = ["model.n_layer=4", "model.n_head=4", "model.n_embd=24", "model.intermediate_size=36"]
# Without the sizes of the model, which the files have.
ALONE = [override for override in TINY if not override.startswith("model.")]
ENDS = ["model.bos_token_id=256", "model.eos_token_id=256"]
MODELS = {
    "gpt2": ["model=gpt2_tiny"],
    "llama": ["model=llama3_tiny", "model.n_kv_head=2", "model.tie_word_embeddings=false"],
    "llama-tied": ["model=llama3_tiny", "model.n_kv_head=2", "model.tie_word_embeddings=true"],
    "qwen3": ["model=qwen3_tiny", "model.n_kv_head=2", "model.head_dim=6"],
}


def overrides_of(family: str) -> list[str]:
    return [*MODELS[family], *ALONE, *SIZES, *ENDS]


def state_of(family: str, seed: int = 1, *overrides: str) -> StateSource:
    """Return a state of random numbers after three iterations."""
    model = compose([*overrides_of(family), *overrides]).model
    generator = torch.Generator().manual_seed(seed)
    tensors = dict[str, torch.Tensor]()
    for name, stored in stored_tensors(model).items():
        for prefix in ("", "exp_avg.", "exp_avg_sq."):
            tensors[prefix + name] = torch.randn(stored.shape, generator=generator)
        tensors[f"step.{name}"] = torch.tensor(3.0)
    return StateSource(model, 3, has_optimizer=True, read=tensors.__getitem__)


def opened(path: Path, overrides: list[str], **options: Any) -> StateSource:
    """Open a checkpoint whose pickles are trusted."""
    return read_source(path, ImportOptions(compose(overrides), trusts_pickle=True, overrides=overrides, **options))


def assert_carried(source: StateSource, state: StateSource) -> None:
    assert (source.model, source.iteration, source.has_optimizer) == (state.model, 3, True)
    for name in stored_tensors(state.model):
        for prefix in ("", "exp_avg.", "exp_avg_sq.", "step."):
            assert torch.equal(source.read(prefix + name), state.read(prefix + name)), prefix + name


HYBRID = {"num_layers": 8, "hybrid_layer_pattern": "*-*-|*-*-", "is_hybrid_model": True}
LAYOUTS = {
    "gpt2 fully": ("gpt2", Way(), Form()),
    "gpt2 fully, no file": ("gpt2", Way(), Form(has_file=False)),
    "gpt2 fully tp2, padded": ("gpt2", Way(tp=2, rows=264), Form(prefix="module.")),
    "gpt2 plain": ("gpt2", Way(tp=2), Form("plain")),
    "gpt2 plain bf16, numbered": ("gpt2", Way(tp=2, dtype=BF16), Form("plain", is_stacked=False)),
    "gpt2 buckets dp2": ("gpt2", Way(dp=2), Form("buckets")),
    "gpt2 buckets tp2 pp2 dp3": ("gpt2", Way(tp=2, pp=2, dp=3, bucket=3000, rows=264), Form("buckets")),
    "gpt2 buckets tp2 pp2 vpp2 te": ("gpt2", Way(2, 2, 2, 2, names="te", bucket=2000), Form("buckets", "module.")),
    "gpt2 buckets bf16 pp4": ("gpt2", Way(pp=4, dp=3, dtype=BF16), Form("buckets", is_stacked=False)),
    "gpt2 flat tp2 dp3": ("gpt2", Way(tp=2, dp=3), Form("flat")),
    "llama fully tp2": ("llama", Way(tp=2, rows=264), Form()),
    "llama plain bf16": ("llama", Way(dtype=BF16), Form("plain")),
    "llama buckets tp2 pp2 dp2 te": ("llama", Way(2, 2, 1, 2, names="te", dtype=BF16, rows=264), Form("buckets")),
    "llama buckets pp2, no file": ("llama", Way(pp=2, dp=2), Form("buckets", has_file=False)),
    "llama buckets vpp2": ("llama", Way(2, 2, 2, 3, bucket=2000, rows=264), Form("buckets")),
    "llama hybrid": ("llama", Way(tp=2, rows=264), Form(is_hybrid=True, has_file=False)),
    "gpt2 hybrid buckets pp2": ("gpt2", Way(pp=2, dp=2, names="te"), Form("buckets", "module.", is_hybrid=True)),
    "llama flat tp2 dp2 bf16": ("llama", Way(tp=2, dp=2, dtype=BF16, rows=264), Form("flat", "module.")),
    "llama tied buckets pp2": ("llama-tied", Way(pp=2, dp=2, bucket=3000), Form("buckets")),
    "llama tied flat, numbered": ("llama-tied", Way(tp=2, dp=2, rows=264), Form("flat", is_stacked=False)),
    "qwen3 fully tp2": ("qwen3", Way(tp=2, rows=264), Form()),
    "qwen3 buckets tp4 pp2 te": ("qwen3", Way(4, 2, 1, 2, names="te", dtype=BF16, rows=264), Form("buckets")),
}


SLOW = {
    "gpt2 fully",
    "gpt2 plain",
    "gpt2 buckets tp2 pp2 dp3",
    "gpt2 flat tp2 dp3",
    "llama fully tp2",
    "llama plain bf16",
    "llama buckets vpp2",
    "llama tied flat, numbered",
    "qwen3 buckets tp4 pp2 te",
}


def _marked(value: str, is_slow: bool) -> Any:
    return pytest.param(value, marks=pytest.mark.slow if is_slow else ())


def padded(way: Way) -> Way:
    """Return a way whose rows divide by the ranks that cut them."""
    return replace(way, rows=264) if way.tp > 1 and not way.rows else way


@pytest.mark.parametrize("layout", [_marked(name, name in SLOW) for name in LAYOUTS])
def test_every_layout_gives_the_numbers_it_was_made_from(tmp_path: Path, layout: str) -> None:
    family, way, form = LAYOUTS[layout]
    state = state_of(family)
    hybrid = HYBRID if form.is_hybrid else {}
    write(tmp_path, state, padded(way), form, qk_layernorm=family == "qwen3", kv_channels=6, **hybrid)
    source = opened(tmp_path, [*ENDS, *ALONE])
    assert_carried(source, state)
    assert source.consumed_samples == 36


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"hybrid_layer_pattern": "M*-M*-M*-M*-"}, "HybridModel with the pattern 'M*-M*-M*-M*-'"),
        ({"hybrid_layer_pattern": "*-*-*-*-/*-"}, "HybridModel with the pattern '*-*-*-*-/*-'"),
        (
            {"hybrid_layer_pattern": None, "hybrid_override_pattern": "*E*E*E*E"},
            "HybridModel with the pattern '*E*E*E*E'",
        ),
        ({"hybrid_layer_pattern": "-*-*-*-*"}, "HybridModel with the pattern '-*-*-*-*'"),
        ({"num_experts": 8}, "num_experts=8: none of our models has it"),
    ],
)
def test_other_patterns_of_a_hybrid_model_are_refused(tmp_path: Path, args: dict[str, Any], named: str) -> None:
    path = write(tmp_path, state_of("llama"), Way(), Form("weights", is_hybrid=True), **{**HYBRID, **args})
    with pytest.raises(MismatchError) as caught:
        opened(path, [*ENDS, *ALONE])
    assert named in str(caught.value)


def test_the_pattern_of_a_hybrid_model_is_that_of_its_tensors() -> None:
    attention, mlp, mamba = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", "mixer.in_proj.weight"
    blocks = [
        f"module.decoder.layers.{n}.{name}" for n, name in enumerate((attention, mlp, mamba, "mlp.router.weight"))
    ]
    assert pattern_of(blocks) == "*-ME"
    assert pattern_of([f"decoder.layers.0.{name}" for name in (attention, mlp)]) is None
    assert pattern_of([f"decoder.layers.{name}" for name in (attention, mlp)]) is None
    assert pattern_of(["decoder.layers.0.self_attention.in_proj.weight"]) == "?"


def test_a_hybrid_model_without_arguments_is_that_of_its_tensors(tmp_path: Path) -> None:
    state = state_of("gpt2")
    path = write(tmp_path, state, Way(), Form("weights", is_hybrid=True))
    common = torch.load(path / "common.pt", weights_only=False)
    del common["args"]
    torch.save(common, path / "common.pt")
    described = ["model=gpt2_tiny", "model.n_head=4", *SIZES[2:], "model.max_position_embeddings=256"]
    source = opened(path, [*described, *ENDS, *ALONE], weights_only=True)
    assert (source.model.n_layer, source.model.vocab_size) == (4, 257)
    for name in stored_tensors(state.model):
        assert torch.equal(source.read(name), state.read(name)), name


def test_a_fused_projection_is_dealt_out_by_query_group() -> None:
    model = compose(overrides_of("llama")).model
    found = by_our_name(correspondences(model))["model.layers.2.self_attn.k_proj.weight"]
    rows, head = found.tensor.shape[0], model.head_width
    fused = torch.arange(rows)[:, None].expand(found.tensor.shape)
    taken = {name[-13:]: found.take(name, fused)[:, 0].tolist() for name in found.names}
    per_group = (2 + 1 + 1) * head  # two heads of queries, then keys, then values
    expected = {"q_proj.weight": [], "k_proj.weight": [], "v_proj.weight": []}
    for row in range(rows):
        place = row % per_group // head
        expected["q_proj.weight" if place < 2 else "k_proj.weight" if place == 2 else "v_proj.weight"].append(row)
    assert taken == expected


def test_gpt2_s_projections_are_turned_and_gate_is_above_up() -> None:
    gpt2 = by_our_name(correspondences(compose(overrides_of("gpt2")).model))
    one = gpt2["transformer.h.1.mlp.c_fc.weight"]
    matrix = torch.randn(36, 24)
    assert one.tensor.stacked == "decoder.layers.mlp.linear_fc1.weight"
    assert torch.equal(one.take("transformer.h.1.mlp.c_fc.weight", matrix), matrix.T)
    llama = by_our_name(correspondences(compose(overrides_of("llama")).model))
    gated = llama["model.layers.3.mlp.up_proj.weight"]
    both = torch.arange(72)[:, None].expand(72, 24)
    assert gated.take("model.layers.3.mlp.gate_proj.weight", both)[:, 0].tolist() == list(range(36))
    assert gated.take("model.layers.3.mlp.up_proj.weight", both)[:, 0].tolist() == list(range(36, 72))


@pytest.mark.parametrize(
    "kind", [_marked(kind, kind in ("flat", "plain")) for kind in ("fully", "buckets", "flat", "plain")]
)
def test_an_optimizer_of_another_save_is_refused(tmp_path: Path, kind: str) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    state, other = state_of("gpt2"), state_of("gpt2", seed=2)
    mixed = StateSource(state.model, 3, True, lambda n: (other if n == name else state).read(n))
    way = Way(dtype=BF16, dp=2)
    path = write(tmp_path / "saved", state, way, Form(kind))
    _replace_weights(path, write(tmp_path / "mixed", mixed, way, Form("weights")))
    source = opened(path, [*ENDS, *ALONE])
    with pytest.raises(CheckpointError, match="The optimizer's copy of a weight differs from the model's") as caught:
        source.read(name)
    assert "decoder.layers.1.mlp.linear_fc1.weight" in str(caught.value)


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


def test_buckets_that_no_known_order_explains_are_refused(tmp_path: Path) -> None:
    state, other = state_of("gpt2"), state_of("gpt2", seed=2)
    path = write(tmp_path / "saved", state, Way(dp=2), Form("buckets"))
    _replace_weights(path, write(tmp_path / "other", other, Way(), Form("weights")))
    with pytest.raises(MismatchError, match="do not hold the parameters of the model in a known order"):
        opened(path, [*ENDS, *ALONE])
    source = opened(path, [*ENDS, *ALONE], weights_only=True)
    assert torch.equal(source.read("transformer.ln_f.bias"), other.read("transformer.ln_f.bias"))


def test_the_first_of_copies_in_buckets_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lay_out = torch_dist_layout._chunk

    def drifted(wholes: Any, model: ModelConfig, way: Way, tp: int, pp: int, vpp: int) -> Any:
        found = lay_out(wholes, model, way, tp, pp, vpp)
        for name, values in found.items():
            if tp == 1 and name.endswith(".linear_proj.bias"):
                found[name] = {key: value + 1 for key, value in values.items()}
        return found

    monkeypatch.setattr(torch_dist_layout, "_chunk", drifted)
    state = state_of("gpt2")
    path = write(tmp_path, state, Way(tp=2, dp=2, rows=264), Form("buckets"))
    with pytest.raises(
        MismatchError, match=r"(?s)copies that differ at .*linear_proj\.bias.*--from-rank0 takes the first"
    ):
        opened(path, [*ENDS, *ALONE])
    assert_carried(opened(path, [*ENDS, *ALONE], from_rank0=True), state)
    # Three kinds of four biases: ten lines, and one on the rest.
    assert sum("the first copy is taken" in line for line in caplog.messages) == 10
    assert sum("copies of more tensors differ" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("family", [_marked(family, family == "llama") for family in MODELS])
def test_an_export_comes_back_with_the_same_bytes(tmp_path: Path, family: str) -> None:
    overrides = overrides_of(family)
    made = write_checkpoint(state_of(family), tmp_path / "made", compose(overrides), consumed_samples=31)
    assert convert.main(["export", "megatron", str(made), str(tmp_path / "out")]) == 0
    back = ["import", "megatron", str(tmp_path / "out"), str(tmp_path / "back"), "--trust-pickle", *ENDS, *ALONE]
    assert convert.main(back) == 0
    found = tmp_path / "back/iter_0000003"
    assert tensor_files(found) == tensor_files(made)
    assert (found / "trainer_state.json").read_text().count('"consumed_samples": 31') == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "made", "out"]


def test_an_export_has_the_arguments_that_megatron_compares(tmp_path: Path) -> None:
    """`check_checkpoint_args` of `megatron/training/checkpointing.py`, with --vocab-file of GPT-2's vocabulary."""
    made = write_checkpoint(state_of("gpt2"), tmp_path / "made", compose(overrides_of("gpt2")))
    assert convert.main(["export", "megatron", str(made), str(tmp_path / "out")]) == 0
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
    made = str(write_checkpoint(state_of("gpt2"), tmp_path / "made", compose(overrides_of("gpt2"))))
    assert "B/s" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert convert.main(["export", "megatron", made, str(tmp_path / "out")]) == 0
    assert re.search(r"iter_0000003: +0%.*/\d+k .*B/s", capsys.readouterr().err)
    assert convert.main(["import", "megatron", str(tmp_path / "out"), str(tmp_path / "back"), "--trust-pickle"]) == 0
    assert re.search(r"iter_0000003.*: +0%.*/\d+k .*B/s", capsys.readouterr().err)


def test_an_export_has_the_steps_of_the_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They need not be the iteration: another program counted them, or some parameters were frozen at first."""
    state = state_of("gpt2")
    steps = {"step.transformer.wte.weight": torch.tensor(2.0)}
    others = replace(state, read=lambda n: steps.get(n, torch.tensor(5.0)) if n.startswith("step.") else state.read(n))
    made = write_checkpoint(others, tmp_path / "made", compose(overrides_of("gpt2")))
    assert convert.main(["export", "megatron", str(made), str(tmp_path / "out")]) == 0
    assert "numbers of steps differ: 5 of 51 parameters, 2 of 1 parameter." in caplog.text
    back = opened(tmp_path / "out", [*ENDS, *ALONE])
    assert (back.iteration, back.read("step.transformer.wpe.weight")) == (3, 5.0)


def test_an_export_of_weights_alone_has_no_optimizer(tmp_path: Path) -> None:
    state = replace(state_of("llama"), has_optimizer=False, iteration=0)
    made = write_checkpoint(state, tmp_path / "made", compose(overrides_of("llama")))
    assert convert.main(["export", "megatron", str(made), str(tmp_path / "out")]) == 0
    keys = dcp.FileSystemReader(tmp_path / "out/iter_0000000").read_metadata().state_dict_metadata
    assert not any(key.startswith("optimizer") for key in keys)
    assert "decoder.layers.mlp.linear_fc2._extra_state/shard_3_4" in keys
    assert not opened(tmp_path / "out", [*ENDS, *ALONE]).has_optimizer


def test_an_export_in_another_form_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = str(write_checkpoint(state_of("gpt2"), tmp_path / "made", compose(overrides_of("gpt2"))))
    assert convert.main(["export", "megatron", made, str(tmp_path / "out"), "--dtype", "bfloat16"]) == 2
    assert "Megatron casts to the dtype of its parameters" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class _Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


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


@pytest.mark.parametrize("where", ["metadata", "common", "arguments", "object", "settings"])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, where: str) -> None:
    form = Form("buckets", has_file=where != "object")
    bomb, path = _Bomb(tmp_path / "boom"), write(tmp_path / "saved", state_of("gpt2"), Way(dp=2), form)
    if where == "metadata":
        metadata = _metadata(path)
        metadata.all_local_plans = [bomb]  # as megatron-core sets it
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    elif where == "settings":
        _replace_value(path, "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1", [bomb])
    elif where == "object":
        _replace_value(path, "common_state/shard_0_1", [{"iteration": 3, "extra": bomb}])
    else:
        common = torch.load(path / "common.pt", weights_only=False)
        if where == "common":
            common["extra"] = bomb
        else:
            common["args"].hook = bomb
        torch.save(common, path / "common.pt")
    with pytest.raises(TrainerError):
        opened(path, [*ENDS, *ALONE])
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("value", [[], {"iteration": 3}, [None]])
def test_a_common_state_of_another_form_is_refused(tmp_path: Path, value: object) -> None:
    path = write(tmp_path, state_of("gpt2"), Way(), Form("weights", has_file=False))
    _replace_value(path, "common_state/shard_0_1", value)
    with pytest.raises(CheckpointError, match="expected a list of one dictionary"):
        opened(path, ALONE)


def test_metadata_changes_no_class_of_this_process(tmp_path: Path) -> None:
    path = write(tmp_path, state_of("gpt2"), Way(), Form())
    name = b"X\x07\0\0\0planted"
    # The class itself on the stack, and then the state (None, {"planted": "planted"}) set on it.
    (path / ".metadata").write_bytes(b"\x80\x02cpathlib\nPosixPath\nN}" + name * 2 + b"s\x86b.")
    try:
        with pytest.raises(
            MismatchError, match=r"attributes of <class 'pathlib\.(?:_local\.)?PurePath'>, which is no value"
        ):
            opened(path, [*ENDS, *ALONE])
        assert not hasattr(tmp_path, "planted")
    finally:
        if hasattr(PurePath, "planted"):
            del PurePath.planted


@pytest.mark.parametrize("has_file", [True, False])
def test_objects_of_unknown_classes_are_left_alone(tmp_path: Path, has_file: bool) -> None:
    form = Form(has_file=has_file)
    path = write(tmp_path, state_of("gpt2"), Way(), form, hook=_Inert(), other=argparse.Namespace(values=1))
    assert_carried(opened(path, [*ENDS, *ALONE]), state_of("gpt2"))


def test_without_the_flag_nothing_is_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "saved", state_of("gpt2"), Way(), Form())
    assert convert.main(["import", "megatron", str(path), str(tmp_path / "new"), *ALONE]) == 2
    assert "--trust-pickle" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        read_source(path, ImportOptions(compose(ALONE)))


def _cut_short(path: Path) -> Path:
    file = max(path.glob("*.distcp"), key=lambda p: p.stat().st_size)
    os.truncate(file, file.stat().st_size - 300)
    return file


def _flipped(path: Path) -> Path:
    file = max(path.glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    at = data.find(state_of("gpt2").read("transformer.wpe.weight").numpy().tobytes()[:64])
    data[at + 5] ^= 1
    file.write_bytes(data)
    return file


def _gone(name: str) -> Callable[[Path], Path]:
    def damage(path: Path) -> Path:
        file = next(iter(sorted(path.glob(name))))
        file.unlink()
        return file

    return damage


@pytest.mark.parametrize(
    "damage",
    [_cut_short, _gone("__*.distcp"), _gone("common.pt"), _gone(".metadata")],
    ids=["cut short", "tensors", "common.pt", "metadata"],
)
def test_damaged_and_missing_files_are_named(tmp_path: Path, damage: Callable[[Path], Path]) -> None:
    path = write(tmp_path, state_of("gpt2"), Way(), Form())
    file = damage(path)
    with pytest.raises(CheckpointError) as caught:
        opened(path, [*ENDS, *ALONE])
    assert file.name in str(caught.value)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, state_of("gpt2"), Way(), Form())
    file = _flipped(path)
    with pytest.raises(CheckpointError, match="A tensor of a DCP folder is damaged") as caught:
        opened(path, [*ENDS, *ALONE]).read("transformer.wpe.weight")
    assert file.name in str(caught.value)


@pytest.mark.parametrize("text", ["4", "", "../../etc", "release"])
def test_a_tracker_without_its_folder_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, state_of("gpt2"), Way(), Form())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointError, match="The newest iteration of a Megatron folder is not there"):
        opened(tmp_path, [*ENDS, *ALONE])


def test_other_backends_and_folders_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, state_of("gpt2"), Way(), Form())
    (path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(MismatchError, match="expected sharded_backend torch_dist, found zarr"):
        opened(path, ALONE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(MismatchError, match=r"A folder holds no Megatron checkpoint.*copy metadata\.json too"):
        opened(tmp_path / "empty", ALONE)


def test_another_model_than_the_arguments_say_is_listed(tmp_path: Path) -> None:
    path = write(tmp_path, state_of("gpt2"), Way(), Form(), num_layers=3, ffn_hidden_size=48)
    with pytest.raises(MismatchError, match="A Megatron checkpoint holds another model") as caught:
        opened(path, [*ENDS, *ALONE])
    assert "decoder.layers.mlp.linear_fc1.weight: shape [4, 36, 24], expected [3, 48, 24]" in str(caught.value)
    path = write(tmp_path / "tied", state_of("llama"), Way(), Form(), untie_embeddings_and_output_weights=False)
    with pytest.raises(MismatchError, match=r"not of the model: output_layer\.weight"):
        opened(path, [*ENDS, *ALONE])


def test_a_group_gives_what_arguments_lack_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "megatron", state_of("gpt2"), Way(), Form(), position_embedding_type=None)
    command = ["import", "megatron", str(path), str(tmp_path / "ours"), "--trust-pickle", *ALONE]
    assert convert.main(command) == 2  # neither GPT-2 nor LLaMA-3
    assert convert.main([*command, "model=gpt2_tiny", "model.n_layer=3"]) == 2
    assert "leave out each model.KEY=VALUE of theirs" in capsys.readouterr().err
    assert convert.main([*command, "model=gpt2_tiny"]) == 0
    state = json.loads((tmp_path / "ours/iter_0000003/trainer_state.json").read_text())
    assert state["model"]["n_embd"] == 24


def test_padded_rows_are_cut_or_kept_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of("gpt2")
    path = write(tmp_path, state, Way(rows=264), Form())
    assert opened(path, [*ENDS, *ALONE]).model.vocab_size == 257
    assert "7 of the embedding's 264 rows are padding and are dropped" in caplog.text
    assert "model.vocab_size=264 keeps them" in caplog.text
    kept = opened(path, ["model.vocab_size=264", *ALONE])
    assert kept.read("exp_avg.transformer.wte.weight").shape == (264, 24)
    assert torch.equal(kept.read("transformer.wte.weight")[:257], state.read("transformer.wte.weight"))
    bare = write(tmp_path / "bare", state, Way(rows=264), Form(), vocab_size=None)
    assert opened(bare, [*ENDS, *ALONE]).model.vocab_size == 264


def test_a_norm_stored_minus_one_gets_it_back(tmp_path: Path) -> None:
    state = state_of("llama")
    source = opened(write(tmp_path, state, Way(dtype=BF16), Form(), apply_layernorm_1p=True), [*ENDS, *ALONE])
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(source.read(name), state.read(name) + 1)
        assert torch.equal(source.read(f"exp_avg.{name}"), state.read(f"exp_avg.{name}"))
    assert torch.equal(source.read("lm_head.weight"), state.read("lm_head.weight"))


def test_a_norm_of_a_hybrid_model_gets_its_one_back(tmp_path: Path) -> None:
    state, form = state_of("llama"), Form("weights", is_hybrid=True)
    path = write(tmp_path, state, Way(), form, **HYBRID, apply_layernorm_1p=True)
    source = opened(path, [*ENDS, *ALONE], weights_only=True)
    for name in ("model.norm.weight", "model.layers.1.post_attention_layernorm.weight"):
        assert torch.equal(source.read(name), state.read(name) + 1)


@pytest.mark.parametrize("kind", [_marked("fully", True), "buckets"])
def test_a_conversion_holds_three_times_the_largest_tensor(tmp_path: Path, kind: str) -> None:
    sizes = ["model.n_layer=1", "model.n_head=4", "model.n_kv_head=4", "model.n_embd=128", "model.intermediate_size=8"]
    ends = ["model.vocab_size=65536", "model.bos_token_id=0", "model.eos_token_id=0"]
    overrides = ["model=llama3_tiny", *ALONE, *sizes, *ends, "model.tie_word_embeddings=true"]
    model = compose(overrides).model
    shapes = {name: stored.shape for name, stored in stored_tensors(model).items()}
    largest = max(prod(shape) for shape in shapes.values()) * 4

    def read(name: str) -> torch.Tensor:
        base = name.split(".", 1)[1] if name.startswith(("exp_avg", "step.")) else name
        return torch.tensor(3.0) if name.startswith("step.") else torch.full(shapes[base], 0.5)

    write(tmp_path / "saved", StateSource(model, 3, has_optimizer=True, read=read), Way(), Form(kind))
    arguments = ["import", "megatron", str(tmp_path / "saved"), str(tmp_path / "new"), "--trust-pickle"]
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, see proc(5)
    assert convert.main([*arguments, *ALONE, *ends[1:]]) == 0
    peak = _resident("VmHWM") - before
    print("peak", peak / largest, "times the largest tensor")
    assert peak <= 3 * largest


@pytest.mark.parametrize("is_gated", [False, True])
def test_parts_are_joined_with_one_in_memory_beside_the_whole(is_gated: bool) -> None:
    alive = list[weakref.ref[Any]]()

    def read(rank: int) -> torch.Tensor:
        assert not any(one() is not None for one in alive)
        values = np.arange(12 * rank, 12 * rank + 12, dtype=np.float32).reshape(4, 3)
        alive.append(weakref.ref(values))
        return torch.from_numpy(values)

    pieces = [RankPiece((4, 3), partial(read, rank)) for rank in range(3)]
    joined = join(pieces, cut=0, is_gated=is_gated, copies=RankCopies(), where="here")
    rows = torch.arange(36.0).reshape(12, 3)
    expected = rows.reshape(3, 2, 2, 3).transpose(0, 1).reshape(12, 3) if is_gated else rows
    assert torch.equal(joined, expected)
    other = RankPiece((4, 1), lambda: torch.zeros(4, 1))
    with pytest.raises(CheckpointError, match=r"found \[4, 1\] of torch.float32 on rank 1"):
        join(
            [RankPiece((4, 3), lambda: torch.zeros(4, 3)), other],
            cut=0,
            is_gated=False,
            copies=RankCopies(),
            where="here",
        )


def _resident(kind: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("kind", ["fully", "buckets"])
def test_lines_name_settings_and_the_order_of_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level("INFO", logger="trainer.interop")
    opened(write(tmp_path, state_of("gpt2"), Way(), Form(kind)), ALONE)
    assert "The order of samples is not carried" in caplog.text
    assert "the schedule was lr_decay_style cosine, max_lr 0.1" in caplog.text
    assert "a group of the optimizer was set to lr 0.1" in caplog.text
    assert "samples of 16 tokens: import with train.seq_length=16" in caplog.text


GPT2_ARGS = {
    "num_layers": 4,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "ffn_hidden_size": 36,
    "max_position_embeddings": 64,
    "norm_epsilon": 1e-5,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "bias_gelu_fusion": True,
    "untie_embeddings_and_output_weights": False,
    "vocab_size": 257,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 6,
}
LLAMA_ARGS = GPT2_ARGS | {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "rotary_base": 500000,
}


def described(args: dict[str, Any], *overrides: str, rows: int = 264) -> DescribedModel:
    return describe(args, rows, 48, ImportOptions(compose([*overrides]), overrides=overrides), where="args")


def test_arguments_describe_the_model() -> None:
    gpt2 = described(GPT2_ARGS).model
    expected = ModelConfig(Family.gpt2, 4, 4, 4, 24, 36, 257, 64, 256, 256, tie_word_embeddings=True)
    assert gpt2 == replace(expected, rope_theta=gpt2.rope_theta)
    assert described(GPT2_ARGS | {"bias_gelu_fusion": False}).model.activation is Activation.gelu
    assert described(GPT2_ARGS | {"hidden_dropout": 0.1}).model.dropout == 0.1
    llama = described(LLAMA_ARGS | {"use_rope_scaling": True, "rope_scaling_factor": 32.0, "init_method_std": 0.01})
    assert (llama.model.family, llama.model.n_kv_head, llama.model.tie_word_embeddings) == (Family.llama3, 2, False)
    assert llama.model.rope_scaling == RopeScaling(factor=32.0)
    assert (llama.model.rope_theta, llama.model.initializer_range, llama.padded_vocab_size) == (500000.0, 0.01, 264)
    untied = {"untie_embeddings_and_output_weights": None}
    assert not described(LLAMA_ARGS | untied, "model.tie_word_embeddings=false").model.tie_word_embeddings
    assert described(LLAMA_ARGS | {"rotary_base": None}).model.rope_theta == 10000.0
    assert described(LLAMA_ARGS | {"qk_layernorm": True}).model.family is Family.qwen3


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (GPT2_ARGS | {"squared_relu": True}, "squared_relu=True"),
        (GPT2_ARGS | {"swiglu": True}, "swiglu=True: gpt2 has False"),
        (GPT2_ARGS | {"normalization": "RMSNorm"}, "normalization='RMSNorm': gpt2 has LayerNorm"),
        (GPT2_ARGS | {"add_bias_linear": False}, "add_bias_linear=False: gpt2 has True"),
        (GPT2_ARGS | {"position_embedding_type": "relative"}, "position_embedding_type='relative'"),
        (GPT2_ARGS | {"num_experts": 8}, "num_experts=8: none of our models has it"),
        (GPT2_ARGS | {"group_query_attention": True, "num_query_groups": 2}, "model.n_kv_head=2"),
        (GPT2_ARGS | {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        (LLAMA_ARGS | {"add_qkv_bias": True}, "add_qkv_bias=True"),
        (LLAMA_ARGS | {"kv_channels": 12}, "kv_channels=12"),
        (LLAMA_ARGS | {"rotary_percent": 0.5}, "rotary_percent=0.5"),
        (LLAMA_ARGS | {"rotary_interleaved": True}, "rotary_interleaved=True"),
        (LLAMA_ARGS | {"multi_latent_attention": True}, "multi_latent_attention=True"),
        (LLAMA_ARGS | {"window_size": (127, 0)}, "window_size=(127, 0)"),
        ({}, "args have no position_embedding_type"),
        ({}, "args have no num_layers: set model.n_layer"),
        ({}, "\nFields that args lack come from model=NAME and model.KEY=VALUE."),
        ({"num_experts": 8}, "num_experts=8: none of our models has it"),
        (GPT2_ARGS | {"vocab_size": 300}, "vocab_size=300: the embedding has 264 rows"),
        ({"position_embedding_type": "rope"}, "args have no num_attention_heads: set model.n_head"),
    ],
)
def test_what_our_models_lack_is_refused_by_name(args: dict[str, Any], named: str) -> None:
    with pytest.raises(MismatchError) as caught:
        described(args)
    assert named in str(caught.value)


def test_fields_that_arguments_lack_come_from_overrides() -> None:
    few = {"num_layers": 4, "hidden_size": 24, "vocab_size": 257}
    found = described(few, "model=gpt2_tiny", "model.intermediate_size=36")
    assert (found.model.n_layer, found.model.n_head, found.model.intermediate_size) == (4, 4, 36)
    assert any("args do not name the form of the GELU" in note for note in found.notes)
    assert "args have no num_attention_heads, and no tensor shows it: taken as model.n_head=4" in found.notes
    named = described(few, "model=gpt2_tiny", "model.intermediate_size=36", "model.n_head=4")
    assert not any("num_attention_heads" in note for note in named.notes)
