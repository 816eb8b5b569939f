"""Folders of a save that `from_pretrained` of transformers and of PEFT opens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from reprise import AsyncSaver, load, load_state_dict, save, save_state_dict, verify
from reprise.loading.reader import open_checkpoint
from reprise.storage.files import Files

SIZES = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
TOKENS = torch.arange(8)[None]


def gpt2(seed: int = 0) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))


def adapted(seed: int, **lora: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model of PEFT on the base `gpt2()`, with an adapter of this seed, and an optimizer of the adapter."""
    peft = pytest.importorskip("peft")
    base = gpt2()
    torch.manual_seed(seed)
    options = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, **lora}
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()


def assert_same_state(model: nn.Module, other: nn.Module) -> None:
    first, second = model.state_dict(), other.state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_from_pretrained_opens_a_save_of_the_library(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = gpt2()
    path = save(tmp_path / "ours", model, torch.optim.AdamW(model.parameters()), iteration=1)
    model.save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        assert (path / name).read_text().strip() == (tmp_path / "theirs" / name).read_text().strip()
    again = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert type(again) is type(model)
    assert_same_state(model, again)
    given = save(tmp_path / "given", model, iteration=1, files={"config.json": {"model_type": "mine"}})
    assert json.loads((given / "config.json").read_text()) == {"model_type": "mine"}
    assert (save_state_dict(tmp_path / "dict", {"model": model}, iteration=1) / "config.json").exists()


@pytest.mark.usefixtures("one_rank")
def test_from_pretrained_opens_a_save_of_a_wrapped_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = nn.parallel.DistributedDataParallel(gpt2())
    path = save(tmp_path / "ours", model, iteration=1)
    assert_same_state(model.module, transformers.AutoModelForCausalLM.from_pretrained(path))
    load(path, other := nn.parallel.DistributedDataParallel(gpt2(1)))
    assert_same_state(model, other)


LORA: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora and biases": {"use_dora": True, "bias": "all"},
    "a whole module": {"modules_to_save": ["ln_f"], "task_type": "CAUSAL_LM"},
    "embeddings": {"target_modules": ["wte", "c_attn"]},
}


@pytest.mark.parametrize("options", LORA.values(), ids=LORA)
def test_peft_opens_the_adapter_of_a_save(tmp_path: Path, options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = adapted(0, **options)
    train(model, optimizer)
    path = save(tmp_path / "ours", model, optimizer, iteration=1)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        safetensors.load_file(folder / "adapter_model.safetensors") for folder in (path, tmp_path / "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    ours, theirs = (json.loads((folder / "adapter_config.json").read_text()) for folder in (path, tmp_path / "theirs"))
    assert ours.pop("target_modules") == sorted(theirs.pop("target_modules"))
    assert ours == theirs
    opened = peft.PeftModel.from_pretrained(gpt2(), path)
    assert torch.equal(opened.eval()(input_ids=TOKENS).logits, model.eval()(input_ids=TOKENS).logits)
    assert not (path / "config.json").exists()
    verify(path)


@pytest.mark.parametrize("options", LORA.values(), ids=LORA)
def test_models_of_peft_are_read_as_they_were_written(tmp_path: Path, options: dict[str, Any]) -> None:
    model, optimizer = adapted(0, **options)
    train(model, optimizer)
    with AsyncSaver(tmp_path / "a") as saver:
        saver.save(1, model, optimizer)
        saver.save(2, model, optimizer)
    save_state_dict(tmp_path / "b", {"model": model, "optimizer": optimizer}, iteration=1)
    for folder in ("a", "b"):
        other, again = adapted(1, **options)
        load(tmp_path / folder, other, again)
        assert_same_state(model, other)
        assert len(again.state) == len(optimizer.state) > 0
        state = {"model": adapted(1, **options)[0].state_dict()}
        load_state_dict(tmp_path / folder, state)
        assert all(torch.equal(value, state["model"][name]) for name, value in model.state_dict().items())


def test_a_save_without_the_names_of_peft_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = adapted(0)
    with monkeypatch.context() as earlier:
        earlier.setattr("reprise.nested.module_tree.add_pretrained", lambda *_: None)
        path = save(tmp_path, model, optimizer, iteration=1)
    load(path, *(again := adapted(1)))
    assert_same_state(model, again[0])


def test_what_peft_stores_otherwise_has_no_file_of_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    several, _ = adapted(0)
    several.add_adapter("second", peft.LoraConfig(r=1, target_modules=["c_attn"], fan_in_fan_out=True))
    prompts = peft.get_peft_model(gpt2(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    added = gpt2()
    added.add_adapter(peft.LoraConfig(r=1, target_modules=["c_attn"], fan_in_fan_out=True))
    for number, model in enumerate((several, prompts, added)):
        path = save(tmp_path, model, iteration=number)
        names = open_checkpoint(path, Files()).manifest.files.keys()
        assert names.isdisjoint({"adapter_config.json", "adapter_model.safetensors", "config.json"})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, fully_shard])
def test_peft_opens_the_adapter_of_a_wrapped_model(tmp_path: Path, wrap: Callable[[Any], nn.Module]) -> None:
    peft = pytest.importorskip("peft")
    model, _ = adapted(0)
    path = save(tmp_path, wrap(model), iteration=1)
    opened = peft.PeftModel.from_pretrained(gpt2(), path)
    assert torch.equal(opened.eval()(input_ids=TOKENS).logits, model.eval()(input_ids=TOKENS).logits)
    load(path, wrap(other := adapted(1)[0]))
    assert_same_state(model, other)
