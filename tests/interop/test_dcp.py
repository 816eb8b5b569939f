"""What torch's DCP has saved goes on here as it would have there, and the other way round. Pickles run no code."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pickle
import re
import resource
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from models.config import ModelConfig
from models.families import stored_tensors
from reprise.channel import single_rank_channel
from reprise.errors import CheckpointError, MismatchError, TrainerError
from reprise.files import FILE_SYSTEM, Files
from reprise.reading import open_checkpoint
from tests.harness import all_files, call_on_ranks, compose, curve, run_ok, tensor_files
from tests.interop.dcp_producers import (
    GPT2,
    SAVED,
    TOTAL,
    batches,
    fsdp2_job,
    load_into,
    make,
    make_adamw,
    overrides_of,
    state_of,
    step,
)
from trainer.commands import checkpoint as look
from trainer.commands import convert
from trainer.interop.dcp.metadata import read_metadata
from trainer.interop.dcp.names import halves_from_pairs
from trainer.interop.dcp.source import FORMAT, read_source
from trainer.interop.formats import ExportOptions, ImportOptions
from trainer.interop.source import StateSource
from trainer.interop.torch_file import PlainObject, open_torch_file
from trainer.launch.process_group import Cluster
from trainer.record.resume_rules import RULES, compared, differences
from trainer.run.build import describe_alone
from trainer.run.saves import build_saves
from trainer.start.decide import Start, decide

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# float32 sums in another order, on losses of about 5: two ranks differ by 5e-7, one by nothing.
FIRST = 1e-5
LATER = 1e-5


def save(state: Mapping[str, Any], folder: Path) -> Path:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder


class Producer:
    """A model of transformers that was trained to `SAVED` iterations on one rank and saved, then went on to `TOTAL`."""

    def __init__(self, family: str, folder: Path) -> None:
        self.overrides = overrides_of(family)
        self.config = compose(self.overrides)
        self.folder = folder
        data = batches(self.config)
        self.model = make(self.config.model)
        self.optimizer = make_adamw(self.model, self.config)
        for batch in data[:SAVED]:
            step(self.model, self.optimizer, batch)
        save({**state_of(self.model, self.optimizer, flat=False), "epoch": 1}, folder / "nested")
        flat = state_of(self.model, self.optimizer, flat=True)
        save({"model": flat["model"], "optimizer": flat["optim"], "step": torch.tensor(3)}, folder / "flat")
        if family != "gpt2":
            titan = as_torchtitan(flat["model"], flat["optim"], self.config.model.n_head)
            save(titan, folder / "torchtitan")
            save(with_fused_moments(titan, self.config.model), folder / "torchtitan fused")
        self.weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.moments = {
            name: {key: value.clone() for key, value in self.optimizer.state[p].items()}
            for name, p in self.model.named_parameters()
        }
        self.losses = [step(self.model, self.optimizer, batch) for batch in data[SAVED:]]


def pairs_from_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo what transformers' conversion script does to LLaMA's own weights, row by row."""
    half = tensor.shape[0] // heads // 2
    rows = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return tensor[rows]


TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def as_torchtitan(model: Mapping[str, Any], optim: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Return a state as torchtitan's checkpoints have it: the model on top, AdamW flattened, and what it adds."""

    def renamed(key: str, value: Any) -> tuple[str, Any]:
        if isinstance(value, torch.Tensor) and value.ndim == 2 and ("q_proj" in key or "k_proj" in key):
            value = pairs_from_halves(value, heads if "q_proj" in key else 2)
        for ours, theirs in TITAN.items():
            key = key.replace(ours, theirs)
        return key, value

    return {
        **dict(renamed(key, value) for key, value in model.items()),
        "optimizer": dict(renamed(key, value) for key, value in optim.items()),
        "lr_scheduler": {"last_epoch": SAVED},
        "dataloader": {"dp_rank_0": b"position", "world_size": 1},
        "train_state": {"step": torch.tensor(SAVED, dtype=torch.int32), "ntokens_seen": torch.tensor(576)},
    }


def with_fused_moments(titan: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return a state of torchtitan since release 0.3, whose fused projection is split in the model alone."""

    def newer(key: str) -> str:
        return key.replace("attention.w", "attention.qkv_linear.w").replace("qkv_linear.wo", "wo")

    optimizer = {newer(key): value for key, value in titan["optimizer"].items()}
    for query in [key for key in optimizer if ".qkv_linear.wq." in key]:
        parts = [optimizer.pop(query.replace(".wq.", f".{name}.")) for name in ("wq", "wk", "wv")]
        if isinstance(parts[0], torch.Tensor) and parts[0].ndim:
            q, k, v = (part.split(model.head_width) for part in parts)
            shared = model.n_head // model.n_kv_head
            groups = [[*q[n * shared : (n + 1) * shared], k[n], v[n]] for n in range(model.n_kv_head)]
            parts[0] = torch.cat([head for group in groups for head in group])
        optimizer[query.replace(".wq.", ".wqkv.")] = parts[0]
    return {newer(key).replace("output.", "lm_head."): value for key, value in titan.items()} | {"optimizer": optimizer}


@pytest.fixture(scope="module")
def producers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Producer]:
    folder = tmp_path_factory.mktemp("producers")
    return {family: Producer(family, folder / family) for family in ("gpt2", "llama", "llama-tied")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours") / "run"
    run_ok(folder, [*GPT2, f"checkpoint.save_interval={SAVED}"])
    return folder


@pytest.fixture(scope="module")
def export(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "out"
    assert convert.main(["export", "dcp", str(run / f"checkpoints/iter_{SAVED:07d}"), str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def fsdp2(export: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], list[float]]:
    folder = tmp_path_factory.mktemp("fsdp2")
    arguments = ["gpt2", str(folder / "saved"), str(export), str(folder / "losses.json")]
    ended = call_on_ranks(fsdp2_job, arguments, folder=folder / "job", ranks=2, timeout_s=120)
    assert ended.ok, ended.text
    theirs, ours = json.loads((folder / "losses.json").read_text())
    return folder / "saved", theirs, ours


def bring_in(source: Path, run: Path, overrides: list[str], *more: str) -> Path:
    arguments = ["import", "dcp", str(source), str(run / "checkpoints"), "--trust-pickle", *more, *overrides]
    assert convert.main(arguments) == 0
    return run / f"checkpoints/iter_{SAVED:07d}"


def opened(folder: Path, overrides: list[str]) -> StateSource:
    return read_source(folder, ImportOptions(compose(overrides), trusts_pickle=True))


def losses_of(run: Path) -> list[float]:
    return [float.fromhex(row[1]) for row in curve(run)]


def assert_same(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected) == TOTAL - SAVED
    assert abs(found[0] - expected[0]) <= FIRST, (found, expected)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= LATER, (found, expected)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("gpt2", "nested"), ("llama", "flat"), ("llama", "torchtitan"), ("llama-tied", "torchtitan")],
)
def test_an_import_goes_on_with_the_losses_of_its_producer(
    producers: dict[str, Producer], tmp_path: Path, family: str, layout: str
) -> None:
    producer = producers[family]
    path = bring_in(producer.folder / layout, tmp_path, producer.overrides)
    assert look.main(["verify", str(path)]) == 0
    run_ok(tmp_path, producer.overrides)
    assert_same(losses_of(tmp_path), producer.losses)


def test_what_two_ranks_of_fsdp2_saved_goes_on_with_their_losses(
    fsdp2: tuple[Path, list[float], list[float]], tmp_path: Path
) -> None:
    saved, theirs, _ = fsdp2
    assert len(list(saved.glob("*.distcp"))) == 2
    bring_in(saved, tmp_path, GPT2)
    run_ok(tmp_path, GPT2)
    assert_same(losses_of(tmp_path), theirs)


def test_wrong_moments_would_be_seen(producers: dict[str, Producer], tmp_path: Path) -> None:
    producer = producers["gpt2"]
    wrong = {name: {**m, "exp_avg": m["exp_avg"] * 1.1} for name, m in producer.moments.items()}
    source = save({"model": producer.weights, "optim": {"state": wrong}}, tmp_path / "wrong")
    bring_in(source, tmp_path / "run", GPT2)
    run_ok(tmp_path / "run", GPT2)
    found = losses_of(tmp_path / "run")
    assert abs(found[0] - producer.losses[0]) <= FIRST
    assert abs(found[-1] - producer.losses[-1]) > 100 * LATER


@pytest.mark.parametrize("layout", ["nested", "flat"])
def test_every_tensor_is_carried_bit_for_bit(producers: dict[str, Producer], layout: str) -> None:
    producer = producers["llama-tied"]
    source = opened(producer.folder / layout, producer.overrides)
    assert (source.iteration, source.has_optimizer) == (SAVED, True)
    for name in stored_tensors(producer.config.model):
        assert torch.equal(source.read(name), producer.weights[name])
        for key, value in producer.moments[name].items():
            assert torch.equal(source.read(f"{key}.{name}"), value)


def test_an_import_states_what_its_source_or_its_user_has(
    producers: dict[str, Producer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    producer = producers["gpt2"]
    state = {**state_of(producer.model, producer.optimizer, flat=False), "iteration": TOTAL, "epoch": 7}
    model = [override for override in producer.overrides if override.startswith(("model", "train."))]
    bring_in(save(state, tmp_path / "saved"), tmp_path / "run", [*model, "optimizer.weight_decay=0.2"])
    path = tmp_path / f"run/checkpoints/iter_{TOTAL:07d}"
    assert "not carried: epoch (1)" in caplog.text
    assert "iteration (1)" not in caplog.text
    saved = json.loads((path / "trainer_state.json").read_text())
    others = ["optimizer.adam_beta2=0.999", "schedule=constant", "train.seed=5", "train.threads=3", "optimizer.lr=0.5"]
    _, description = describe_alone(compose([*model, *others, "optimizer.weight_decay=0.3"]))
    found = differences(*compared(saved, description), RULES)
    assert [d.field for d in found] == ["adam.weight_decay"]
    start = started(tmp_path / "run", producer.overrides)
    assert start.source.is_own
    assert start.began_elsewhere  # the iterations before are in no log of ours


def started(run: Path, overrides: list[str]) -> Start:
    """Return what a run starts from, as a first launch decides it."""
    config = compose([*overrides, f"run.dir={run}"])
    cluster = Cluster(0, 1, torch.device("cpu"), 1, single_rank_channel(), "test")
    with build_saves(config, cluster, FILE_SYSTEM) as saves:
        return decide(config, cluster, saves)


def test_a_model_compiled_layer_by_layer_comes_in(producers: dict[str, Producer], tmp_path: Path) -> None:
    producer = producers["gpt2"]
    state = state_of(producer.model, producer.optimizer, flat=True)
    compiled = {
        part: {re.sub(r"(\.h\.\d+\.)", r"\1_orig_mod.", key): value for key, value in state[part].items()}
        for part in ("model", "optim")
    }
    assert any("h.0._orig_mod." in key for key in compiled["model"])
    source = opened(save(compiled, tmp_path / "saved"), producer.overrides)
    assert source.has_optimizer
    for name, value in state["model"].items():
        if name != "lm_head.weight":
            assert torch.equal(source.read(name), value)
            assert torch.equal(source.read(f"exp_avg.{name}"), state["optim"][f"state.{name}.exp_avg"])


def test_an_export_fills_transformers_and_returns_the_same_bytes(run: Path, export: Path, tmp_path: Path) -> None:
    config = compose(GPT2)
    for flat in (False, True):
        model = make(config.model, seed=2)
        optimizer = make_adamw(model, config, lr=5.0)
        load_into(model, optimizer, export, flat=flat)
        assert {group["lr"] for group in optimizer.param_groups} == {config.optimizer.lr}
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert_same([step(model, optimizer, batch) for batch in batches(config)[SAVED:]], losses_of(run)[SAVED:])
    state = {"model": make(config.model, seed=2).state_dict()}  # and with nothing but what the model itself gives
    dcp.load(state, checkpoint_id=export, no_dist=True)
    tied = state["model"]["lm_head.weight"], state["model"]["transformer.wte.weight"]
    assert torch.equal(*tied)

    path = bring_in(export, tmp_path, [o for o in GPT2 if not o.startswith("model")])  # a config.json lies beside
    assert tensor_files(path) == tensor_files(run / f"checkpoints/iter_{SAVED:07d}")


def test_an_export_fills_two_ranks_of_fsdp2(fsdp2: tuple[Path, list[float], list[float]], run: Path) -> None:
    assert_same(fsdp2[2], losses_of(run)[SAVED:])


@pytest.mark.parametrize("layout", ["nested", "torchtitan", "torchtitan fused"])
def test_llama_comes_in_and_goes_out_bit_for_bit(producers: dict[str, Producer], tmp_path: Path, layout: str) -> None:
    producer = producers["llama"]
    path = bring_in(producer.folder / layout, tmp_path / "run", producer.overrides)
    assert convert.main(["export", "dcp", str(path), str(tmp_path / "out")]) == 0
    model = make(producer.config.model, seed=2)
    optimizer = make_adamw(model, producer.config)
    load_into(model, optimizer, tmp_path / "out", flat=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, producer.weights[name])
        for key, value in producer.moments[name].items():
            assert torch.equal(optimizer.state[parameter][key], value)


def test_an_export_of_weights_alone_has_no_optimizer(run: Path, tmp_path: Path) -> None:
    run_ok(tmp_path / "run", [*GPT2, "train.train_iters=1", "checkpoint.no_save_optim=true"])
    assert convert.main(["export", "dcp", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    keys = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert not any(key.startswith("optim") for key in keys)
    assert not opened(tmp_path / "out", GPT2).has_optimizer


def test_an_export_replaces_nothing_and_fails_cleanly(
    run: Path, export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = all_files(export)
    assert convert.main(["export", "dcp", str(run), str(export)]) == 2
    assert "There is something already" in capsys.readouterr().err
    assert all_files(export) == before
    damaged = tmp_path / "iter_0000003"
    shutil.copytree(run / "checkpoints/iter_0000003", damaged)
    file = next((damaged / "optimizer").iterdir())
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert FORMAT.write is not None
    with pytest.raises(CheckpointError, match="A tensor is damaged"):
        FORMAT.write(open_checkpoint(damaged, Files()), tmp_path / "out", ExportOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000003"]


def test_an_export_to_a_full_disk_says_so_and_leaves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        assert convert.main(["export", "dcp", str(run), str(tmp_path / "out")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"(errno {errno.EFBIG})" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_export_in_another_dtype_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(["export", "dcp", str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 2
    assert "dcp.load casts" in capsys.readouterr().err


def test_without_the_flag_nothing_is_unpickled(
    producers: dict[str, Producer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = producers["gpt2"].folder / "nested"
    assert convert.main(["import", "dcp", str(source), str(tmp_path / "new"), *GPT2]) == 2
    message = capsys.readouterr().err
    assert "can run code" in message
    assert "--trust-pickle" in message
    assert not (tmp_path / "new").exists()


@dataclass(frozen=True)
class Reduced:
    """A value that is pickled as a call."""

    function: Any
    arguments: tuple[object, ...]

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize("where", ["metadata", "tensor", "step", "setting"])
def test_even_with_the_flag_code_in_a_pickle_is_not_run(
    producers: dict[str, Producer], tmp_path: Path, where: str
) -> None:
    folder_of_bomb, producer = tmp_path / "bang", producers["gpt2"]
    bomb = Reduced(os.mkdir, (str(folder_of_bomb),))
    moments: dict[str, Any] = {name: dict(values) for name, values in producer.moments.items()}
    if where == "step":
        moments["transformer.wpe.weight"]["step"] = bomb
    group = {"lr": bomb if where == "setting" else 0.1, "params": []}
    folder = save({"model": producer.weights, "optim": {"state": moments, "param_groups": [group]}}, tmp_path / "in")
    metadata = dcp.FileSystemReader(folder).read_metadata()
    if where == "metadata":
        metadata.planner_data = bomb
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    if where == "tensor":
        info = next(v for k, v in metadata.storage_data.items() if k.fqn == "model.transformer.wpe.weight")
        raw = pickle.dumps(bomb, protocol=2)
        data = bytearray((folder / info.relative_path).read_bytes())
        data[info.offset : info.offset + info.length] = raw.ljust(info.length, b"\0")
        (folder / info.relative_path).write_bytes(data)
    if where == "setting":  # it would only have been told
        opened(folder, GPT2)
    else:
        expected = {"metadata": "no part of DCP's metadata", "tensor": r"model\.transformer\.wpe\.weight"}
        with pytest.raises(CheckpointError, match=expected.get(where, r"state\.transformer\.wpe\.weight\.step")):
            opened(folder, GPT2).read("transformer.wpe.weight")
    assert not folder_of_bomb.exists()


def test_bfloat16_weights_and_plain_steps_are_read_and_reported(
    producers: dict[str, Producer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    producer = producers["gpt2"]
    weights = {f"module.{name}": w.bfloat16() for name, w in producer.weights.items()}
    moments = {name: {**values, "step": 3} for name, values in producer.moments.items()}
    optim = {"state": moments, "param_groups": [{"lr": 0.5, "betas": (0.8, 0.9), "params": list(moments)}]}
    folder = save({"app": {"net": weights, "adam": optim}, "sampler": {"position": 7}}, tmp_path / "in")
    with caplog.at_level(logging.INFO):
        source = opened(folder, producer.overrides)
    assert "betas (0.8, 0.9); lr 0.5" in caplog.text
    assert "not carried: param_groups (3), sampler (1)" in caplog.text
    name = "transformer.h.1.attn.c_attn.weight"
    assert torch.equal(source.read(name), producer.weights[name].bfloat16())
    assert torch.equal(source.read(f"exp_avg_sq.{name}"), producer.moments[name]["exp_avg_sq"])
    assert torch.equal(source.read(f"step.{name}"), torch.tensor(3.0))
    assert source.iteration == 3


def test_weights_beside_numbered_moments_come_in_if_asked_for(
    producers: dict[str, Producer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    producer = producers["gpt2"]
    folder = save({"model": producer.weights, "optim": producer.optimizer.state_dict()}, tmp_path / "in")
    with pytest.raises(MismatchError, match="--weights-only"):
        opened(folder, producer.overrides)
    asked = ["import", "dcp", str(folder), str(tmp_path / "new"), "--trust-pickle", "--weights-only", *GPT2]
    with caplog.at_level(logging.INFO):
        assert convert.main(asked) == 0
    assert "get_optimizer_state_dict" in caplog.text
    assert not (tmp_path / "new/iter_0000000/optimizer").exists()


REFUSED = {
    "sizes": (["model.n_layer=1"], r"transformer\.h\.1\.ln_1\.weight: not part of the model"),
    "more-layers": (["model.n_layer=3"], r"transformer\.h\.2\.ln_1\.weight: missing"),
    "vocabulary": (["model.vocab_size=300"], r"wte\.weight: shape \[257, 20\], expected \[300, 20\]"),
    "family": (["model=llama3_tiny"], r"no model of family llama3 .*model\.embed_tokens\.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_model_is_refused_with_all_that_differs(producers: dict[str, Producer], case: str) -> None:
    more, message = REFUSED[case]
    with pytest.raises(MismatchError, match=message):
        opened(producers["gpt2"].folder / "nested", [*GPT2, *more])


def test_a_tie_that_is_told_wrong_is_refused(producers: dict[str, Producer], tmp_path: Path) -> None:
    producer = producers["gpt2"]
    folder = save({"model": producer.weights}, tmp_path / "tied")
    with pytest.raises(MismatchError, match=r"tied: set model\.tie_word_embeddings=true"):
        opened(folder, [*GPT2, "model.tie_word_embeddings=false"])
    both = {**producer.weights, "lm_head.weight": producer.weights["transformer.wte.weight"] + 1}
    source = opened(save({"model": both}, tmp_path / "two"), producer.overrides)
    with pytest.raises(MismatchError, match=r"not tied .*model.tie_word_embeddings=false"):
        source.read("transformer.wte.weight")


def test_moments_of_a_part_of_the_model_are_refused(producers: dict[str, Producer], tmp_path: Path) -> None:
    producer = producers["gpt2"]
    moments = {name: values for name, values in producer.moments.items() if "h.1" not in name}
    folder = save({"model": producer.weights, "optim": {"state": moments}}, tmp_path / "in")
    with pytest.raises(MismatchError, match=r"part of the model only.*h\.1\.ln_1\.weight\.exp_avg: missing"):
        opened(folder, producer.overrides)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("__0.metadata", "use_collectives"),
        ("metadata.pkl", "torch_checkpointing"),
        ("shard-00001-model-00001-of-00002.safetensors", "consolidate_distributed_checkpoint"),
        ("model.safetensors", "`hf`"),
    ],
)
def test_a_similar_checkpoint_is_named(tmp_path: Path, name: str, advice: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=advice):
        opened(tmp_path, GPT2)


def test_a_folder_that_is_not_whole_is_refused(producers: dict[str, Producer], tmp_path: Path) -> None:
    producer = producers["gpt2"]

    def refused(folder: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            opened(folder, producer.overrides)
        return str(caught.value)

    steps = tmp_path / "steps"
    shutil.copytree(producer.folder / "nested", steps / "step-3")
    assert "step-3" in refused(steps)
    assert "no folder" in refused(tmp_path / "none")
    folder = steps / "step-3"
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file.name}: " in refused(folder)
    file.unlink()
    assert f"{file.name}: no such file" in refused(folder)
    (folder / ".metadata").write_bytes(b"")
    assert "an empty file" in refused(folder)
    (folder / ".metadata").unlink()
    assert "no DCP checkpoint" in refused(folder)


def test_a_flipped_bit_in_a_tensor_is_found(producers: dict[str, Producer], tmp_path: Path) -> None:
    producer = producers["gpt2"]
    folder = save({"model": producer.weights}, tmp_path / "in")
    file = next(folder.glob("*.distcp"))
    raw = producer.weights["transformer.wpe.weight"].numpy().tobytes()
    data = bytearray(file.read_bytes())
    data[data.index(raw) + 100] ^= 1
    file.write_bytes(data)
    source = opened(folder, GPT2)
    source.read("transformer.wte.weight")
    with pytest.raises(CheckpointError, match=r"damaged .*model\.transformer\.wpe\.weight.*checksum"):
        source.read("transformer.wpe.weight")


def test_overlapping_chunks_and_compressed_values_are_refused(producers: dict[str, Producer], tmp_path: Path) -> None:
    producer = producers["gpt2"]
    folder = save({"model": producer.weights}, tmp_path / "in")
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - written a moment ago
    key = "model.transformer.wpe.weight"
    entry, info = metadata.state_dict_metadata[key], metadata.storage_data[MetadataIndex(key, [0, 0])]
    height, width = entry.size
    half = torch.Size([height // 2, width])
    entry.chunks = [ChunkStorageMetadata(torch.Size([at, 0]), half) for at in (0, 1)]
    metadata.storage_data |= {MetadataIndex(key, chunk.offsets): info for chunk in entry.chunks}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"{key}: its chunks overlap"):
        opened(folder, GPT2)

    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), entry.size)]
    data = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    with (
        zipfile.ZipFile(io.BytesIO(data)) as stored,
        zipfile.ZipFile(folder / "__9_0.distcp", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    size = (folder / "__9_0.distcp").stat().st_size
    metadata.storage_data[MetadataIndex(key, [0, 0])] = replace(
        info, relative_path="__9_0.distcp", offset=0, length=size
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    source = opened(folder, GPT2)
    with pytest.raises(CheckpointError, match=rf"damaged .*__9_0\.distcp, {key}.* is compressed"):
        source.read("transformer.wpe.weight")


class Zone(Enum):
    """An enumeration of another program."""

    EAST = 1


class ByName(pickle.Pickler):
    """A pickler of Python 3.11.0 to 3.11.3, which pickles members of enumerations by their name."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_a_member_of_an_enumeration_comes_by_its_name(tmp_path: Path) -> None:
    module = SimpleNamespace(__name__="by_name", Pickler=ByName)
    torch.save({"zone": Zone.EAST}, tmp_path / "state.pt", pickle_module=module)
    zone = open_torch_file(tmp_path / "state.pt", PlainObject)["zone"]
    assert (zone.values, str(zone)) == (("EAST",), "'EAST'")


def test_metadata_of_the_first_releases_of_python_3_11_is_read(producers: dict[str, Producer], tmp_path: Path) -> None:
    producer = producers["gpt2"]
    folder = save({"model": producer.weights}, tmp_path / "in")
    metadata, named = dcp.FileSystemReader(folder).read_metadata(), io.BytesIO()
    ByName(named).dump(metadata)
    assert b"getattr" in named.getvalue()
    (folder / ".metadata").write_bytes(named.getvalue())
    assert shapes_and_dtypes(read_metadata(folder / ".metadata")) == shapes_and_dtypes(metadata)


@pytest.mark.parametrize("strides", [(), ((2, 1),)], ids=["torch before 2.15", "torch 2.15"])
def test_metadata_of_every_torch_is_read(
    producers: dict[str, Producer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strides: tuple[object, ...]
) -> None:
    producer = producers["gpt2"]
    folder = save({"model": producer.weights}, tmp_path / "in")
    metadata = dcp.FileSystemReader(folder).read_metadata()
    members = TensorProperties.__getstate__
    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", lambda properties: members(properties)[:5] + strides)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert shapes_and_dtypes(read_metadata(folder / ".metadata")) == shapes_and_dtypes(metadata)
    assert opened(folder, GPT2).read("transformer.wte.weight").equal(producer.weights["transformer.wte.weight"])


def test_an_unknown_property_of_a_tensor_is_named(
    producers: dict[str, Producer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save({"model": producers["gpt2"].weights}, tmp_path / "in")
    metadata = dcp.FileSystemReader(folder).read_metadata()
    members = TensorProperties.__getstate__
    with monkeypatch.context() as patch:
        patch.setattr(
            TensorProperties, "__getstate__", lambda properties: (*members(properties)[:5], (2, 1), "blocked")
        )
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MismatchError, match="'blocked'"):
        read_metadata(folder / ".metadata")


def shapes_and_dtypes(metadata: Metadata) -> dict[str, tuple[torch.Size, torch.dtype, list[ChunkStorageMetadata]]]:
    """Return what an import takes from the metadata of each tensor."""
    tensors = metadata.state_dict_metadata.items()
    return {
        key: (entry.size, entry.properties.dtype, entry.chunks)
        for key, entry in tensors
        if isinstance(entry, TensorStorageMetadata)
    }


@pytest.mark.parametrize("value", ["a text", 5])
def test_an_attribute_of_a_value_in_metadata_is_not_looked_up(tmp_path: Path, value: object) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Reduced(getattr, (value, "__class__"))))
    with pytest.raises(MismatchError, match=r"builtins\.getattr of no enumeration"):
        read_metadata(tmp_path / ".metadata")


def test_metadata_that_is_damaged_at_random_is_refused_or_read(producers: dict[str, Producer], tmp_path: Path) -> None:
    producer, random, refused = producers["gpt2"], Random(1), 0
    folder = save({"model": producer.weights}, tmp_path / "in")
    whole, asked = (folder / ".metadata").read_bytes(), ImportOptions(producer.config, trusts_pickle=True)
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(random.choice((1, 1, 3))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        cut = random.randrange(len(data)) if random.random() < 0.2 else len(data)
        (folder / ".metadata").write_bytes(data[:cut])
        try:
            read_source(folder, asked).read("transformer.wte.weight")
        except TrainerError:
            refused += 1
    assert 50 < refused <= 100


def test_torchtitan_s_rotation_is_ours_after_reordering_rows() -> None:
    heads, head_dim, width, length = 3, 8, 5, 7
    generator = torch.Generator().manual_seed(1)
    theirs = [torch.randn(heads * head_dim, width, generator=generator, dtype=torch.float64) for _ in range(2)]
    x = torch.randn(length, width, generator=generator, dtype=torch.float64)
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)).double()

    def in_pairs(weight: torch.Tensor) -> torch.Tensor:
        """Rotate adjacent pairs as complex numbers, as the reference code of LLaMA and torchtitan do."""
        pairs = torch.view_as_complex((x @ weight.T).view(length, heads, head_dim // 2, 2))
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).flatten(2)

    def in_halves(weight: torch.Tensor) -> torch.Tensor:
        """Rotate the two halves of a head, as transformers and we do."""
        a, b = (x @ weight.T).view(length, heads, 2, head_dim // 2).unbind(2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    expected = torch.einsum("qhd,khd->hqk", *map(in_pairs, theirs))
    ours = [halves_from_pairs(weight, head_dim) for weight in theirs]
    torch.testing.assert_close(torch.einsum("qhd,khd->hqk", *map(in_halves, ours)), expected)
    assert not torch.allclose(torch.einsum("qhd,khd->hqk", *map(in_halves, theirs)), expected)
    assert torch.equal(pairs_from_halves(ours[0], heads), theirs[0])
