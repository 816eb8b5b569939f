"""Adapters that a run has trained are opened by PEFT, and merged with the bits that PEFT merges."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from reprise.errors import MismatchError, TrainerError
from tests.harness import TINY, run_ok
from tests.interop.states import begun
from tests.messages import refused
from trainer.commands import checkpoint as look
from trainer.commands import convert, generate

SIZES = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "initializer_range": 0.2}
GPT2 = GPT2Config(n_layer=2, n_head=2, n_embd=20, n_inner=44, n_positions=32, **SIZES)
LLAMA = LlamaConfig(
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, hidden_size=20, intermediate_size=44,
    max_position_embeddings=32, rms_norm_eps=1e-5, rope_theta=500000.0, **SIZES,
)  # fmt: skip
RUN = [*TINY, "model.lora.rank=4", "optimizer.lr=0.05", "train.train_iters=4", "checkpoint.finetune=true"]
CASES = {
    "gpt2": (GPT2LMHeadModel, GPT2, ["model=gpt2_tiny", "model.lora.target_modules=[c_attn,c_proj,mlp.c_fc]"]),
    "llama3": (
        LlamaForCausalLM,
        LLAMA,
        ["model=llama3_tiny", "model.n_kv_head=2", "model.lora.target_modules=[k_proj,o_proj,gate_proj,down_proj]"],
    ),
}


@dataclass(frozen=True)
class Trained:
    """A run of adapters, and the base beneath them."""

    base: Path
    run: Path
    overrides: list[str]

    @property
    def iteration(self) -> Path:
        return self.run / "checkpoints/iter_0000004"

    def peft(self) -> PeftModel:
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(self.base), self.iteration).eval()


@pytest.fixture(scope="module", params=["gpt2", pytest.param("llama3", marks=pytest.mark.slow)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return adapters after four iterations; the base is a folder of transformers."""
    kind, config, model = CASES[request.param]
    folder = tmp_path_factory.mktemp("peft")
    torch.manual_seed(7)
    kind(config).save_pretrained(folder / "base")
    overrides = [*RUN, *model, f"checkpoint.load={folder / 'base'}"]
    run_ok(folder / "run", overrides)
    return Trained(folder / "base", folder / "run", overrides)


def test_peft_has_our_logits_and_the_bits_of_our_adapters(trained: Trained) -> None:
    run = begun(*trained.overrides, f"run.dir={trained.run}")
    assert run.state.progress.iteration == 4
    tokens = torch.randint(0, 257, (3, 32), generator=torch.Generator().manual_seed(1))
    model = trained.peft()
    with torch.no_grad():
        ours, theirs = run.state.parts[0].model(tokens), model(tokens).logits
        bare = AutoModelForCausalLM.from_pretrained(trained.base)(tokens).logits
    assert (ours - theirs).abs().max() <= 1e-5
    assert (ours - bare).abs().max() > 1e-2  # the adapters say something

    saved = load_file(trained.iteration / "adapter_model.safetensors")
    found = {name.replace(".default.", "."): value for name, value in model.state_dict().items() if "lora" in name}
    assert saved.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in saved.items())


def test_merged_weights_have_the_bits_of_peft(trained: Trained, tmp_path: Path) -> None:
    command = ["export", "hf", "--merge", str(trained.base), str(trained.iteration), str(tmp_path / "merged")]
    assert convert.main(command) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    theirs = trained.peft().merge_and_unload().state_dict()
    assert merged.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in merged.items())


@pytest.mark.slow
def test_adapters_saved_alone_merge_with_the_bits_of_peft(trained: Trained, tmp_path: Path) -> None:
    run_ok(tmp_path / "run", [*trained.overrides, "checkpoint.save_weights_interval=4"])
    (light,) = (tmp_path / "run/checkpoints/weights").glob("iter_*")
    assert all(value.dtype is torch.bfloat16 for value in load_file(light / "adapter_model.safetensors").values())
    assert convert.main(["export", "hf", "--merge", str(trained.base), str(light), str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(trained.base), light)
    assert all(torch.equal(merged[name], value) for name, value in theirs.merge_and_unload().state_dict().items())


@pytest.mark.parametrize("trained", ["gpt2"], indirect=True)
def test_other_bases_and_bare_adapters_begin_no_run(
    trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    out, other = tmp_path / "out", tmp_path / "other"
    GPT2LMHeadModel(GPT2).save_pretrained(other)
    shutil.copytree(trained.run, tmp_path / "run")
    with refused(MismatchError, "base.xxh3_64"):
        begun(*trained.overrides, f"run.dir={tmp_path / 'run'}", f"checkpoint.load={other}")
    assert convert.main(["export", "hf", str(trained.iteration), str(out)]) == 0
    new = [*trained.overrides, f"run.dir={tmp_path / 'new'}"]
    base = ["checkpoint.load=auto", "checkpoint.finetune=false", f"checkpoint.base={out}"]
    for keys in (base, [f"checkpoint.load={out}"]):  # in PEFT's form alone, without a manifest
        with refused(MismatchError, str(out)):
            begun(*new, *keys)
    with refused(TrainerError, str(trained.base)):  # no adapters to load beside a base
        begun(*new, f"checkpoint.base={trained.base}")


@pytest.mark.parametrize("trained", ["gpt2"], indirect=True)
def test_formats_of_whole_models_refuse_adapters(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    GPT2LMHeadModel(GPT2).save_pretrained(tmp_path / "other")
    iteration, out = str(trained.iteration), str(tmp_path / "out")
    cases = {
        "a different base": ["export", "hf", "--merge", str(tmp_path / "other"), iteration, out],
        "model.lora.rank=4": ["import", "hf", str(trained.base), out, "model.lora.rank=4"],
        "reprise convert export hf --merge": ["export", "dcp", iteration, out],
    }
    for named, command in cases.items():
        assert convert.main(command) == 2
        assert named in capsys.readouterr().err
    assert not Path(out).exists()
    assert generate.main([str(trained.run), "--base", str(tmp_path / "nowhere"), "--max-new-tokens", "2"]) == 2
    text = capsys.readouterr().err
    assert "nowhere" in text
    assert "iter_0000004" not in text  # a base that is not there is no damage of adapters


def test_an_export_without_merging_is_the_adapters_alone(trained: Trained, tmp_path: Path) -> None:
    assert convert.main(["export", "hf", str(trained.iteration), str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} < names
    assert not names & {"config.json", "model.safetensors"}
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (trained.iteration, tmp_path / "out"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(trained.base), tmp_path / "out")


@pytest.mark.parametrize("trained", ["gpt2"], indirect=True)
def test_the_commands_know_checkpoints_of_adapters(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert look.main(["ls", "--json", str(trained.run)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["intact"] == "yes"
    assert "adapters" in row["notes"]
    assert look.main(["verify", str(trained.iteration)]) == 0
    assert look.main(["show", str(trained.iteration)]) == 0
    assert "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight" in capsys.readouterr().out
    assert generate.main([str(trained.iteration), "--max-new-tokens", "2"]) == 2
    assert "--base" in capsys.readouterr().err
    assert generate.main([str(trained.iteration), "--base", str(trained.base), "--max-new-tokens", "2"]) == 0
