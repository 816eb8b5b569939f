"""Folders of a save that `from_pretrained` of transformers and of PEFT opens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from reprise import AsyncSaver, load, load_state_dict, save, save_state_dict, verify
from reprise.loading.reader import open_checkpoint
from reprise.nested.pretrained import PretrainedForm
from reprise.storage.files import Files
from tests.states import assert_same

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


def test_from_pretrained_opens_a_save_of_the_library(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = gpt2()
    path = save(tmp_path / "ours", model, torch.optim.AdamW(model.parameters()), iteration=1)
    model.save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        assert (path / name).read_text().strip() == (tmp_path / "theirs" / name).read_text().strip()
    again = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert type(again) is type(model)
    assert_same(model.state_dict(), again.state_dict())
    given = save(tmp_path / "given", model, iteration=1, files={"config.json": {"model_type": "mine"}})
    assert json.loads((given / "config.json").read_text()) == {"model_type": "mine"}
    assert (save_state_dict(tmp_path / "dict", {"model": model}, iteration=1) / "config.json").exists()


def test_a_model_of_peft_is_read_as_it_was_written(tmp_path: Path) -> None:
    options = {"target_modules": ["wte", "c_attn"], "modules_to_save": ["ln_f"], "use_dora": True}
    model, optimizer = adapted(0, **options)
    train(model, optimizer)
    with AsyncSaver(tmp_path / "a") as saver:
        saver.save(1, model, optimizer)
        saver.save(2, model, optimizer)
    save_state_dict(tmp_path / "b", {"model": model, "optimizer": optimizer}, iteration=1)
    for folder in ("a", "b"):
        other, again = adapted(1, **options)
        load(tmp_path / folder, other, again)
        assert_same(model.state_dict(), other.state_dict())
        assert len(again.state) == len(optimizer.state) > 0
        state = {"model": adapted(1, **options)[0].state_dict()}
        load_state_dict(tmp_path / folder, state)
        assert_same(model.state_dict(), state["model"])


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


PROJECTIONS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
# The class of a method's configuration and its options; its file is opened, or there is none.
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("LoraConfig", {"use_dora": True, "bias": "all", "modules_to_save": ["norm"]}),
    ("LoraConfig", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    ("VeraConfig", {"r": 2}),
    ("TrainableTokensConfig", {"token_indices": [1, 3], "target_modules": None}),
    ("LoraConfig", {"target_modules": ["embed_tokens", "lm_head"]}),
]


@pytest.mark.parametrize(
    ("kind", "options"), [*METHODS[:2], *(pytest.param(*method, marks=pytest.mark.slow) for method in METHODS[2:])]
)
def test_peft_opens_every_method_or_finds_no_adapter(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")

    def made() -> Any:
        return peft.get_peft_model(llama(), getattr(peft, kind)(**{**PROJECTIONS, **options}))

    model = made()
    for parameter in model.parameters():
        parameter.data += 0.01 if parameter.requires_grad else 0.0
    path = save(tmp_path, model, iteration=1)
    load(path, other := made())
    assert_same(model.state_dict(), other.state_dict())
    is_open = (path / "adapter_config.json").exists()
    assert is_open or "ensure_weight_tying" in options
    if is_open:
        opened = peft.PeftModel.from_pretrained(llama(), path)
        assert torch.equal(opened.eval()(input_ids=TOKENS).logits, model.eval()(input_ids=TOKENS).logits)
        verify(path)
    if "use_dora" in options:
        model.save_pretrained(tmp_path / "theirs")
        ours, theirs = (load_file(at / "adapter_model.safetensors") for at in (path, tmp_path / "theirs"))
        assert_same(dict(sorted(theirs.items())), dict(sorted(ours.items())))
        ours, theirs = (json.loads((at / "adapter_config.json").read_text()) for at in (path, tmp_path / "theirs"))
        assert {**theirs, "target_modules": sorted(theirs["target_modules"])} == ours


def test_a_save_without_the_names_of_peft_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = adapted(0)
    with monkeypatch.context() as earlier:
        earlier.setattr("reprise.nested.tree.form_of", lambda *_: PretrainedForm())
        path = save(tmp_path, model, optimizer, iteration=1)
    load(path, *(again := adapted(1)))
    assert_same(model.state_dict(), again[0].state_dict())


def test_what_peft_stores_otherwise_has_no_file_of_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    several, _ = adapted(0)
    several.add_adapter("second", peft.LoraConfig(r=1, target_modules=["c_attn"], fan_in_fan_out=True))
    prompts = peft.get_peft_model(gpt2(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    added = gpt2()
    added.add_adapter(peft.LoraConfig(r=1, target_modules=["c_attn"], fan_in_fan_out=True))
    none, _ = adapted(0)
    none.delete_adapter("default")
    for number, model in enumerate((several, prompts, added, none)):
        path = save(tmp_path / str(number), model, iteration=1)
        names = open_checkpoint(path, Files()).manifest.files.keys()
        assert names.isdisjoint({"adapter_config.json", "adapter_model.safetensors", "config.json"})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("wrap", "is_adapted"), [(nn.parallel.DistributedDataParallel, False), (fully_shard, True)], ids=["DDP", "FSDP2"]
)
def test_from_pretrained_opens_a_save_of_a_wrapped_model(
    tmp_path: Path, wrap: Callable[[Any], nn.Module], is_adapted: bool
) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    model, other = (adapted(seed)[0] if is_adapted else gpt2(seed) for seed in (0, 1))
    path = save(tmp_path, wrap(model), iteration=1)
    theirs = transformers.AutoModelForCausalLM
    opened = peft.PeftModel.from_pretrained(gpt2(), path) if is_adapted else theirs.from_pretrained(path)
    assert torch.equal(opened.eval()(input_ids=TOKENS).logits, model.eval()(input_ids=TOKENS).logits)
    load(path, wrap(other))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
