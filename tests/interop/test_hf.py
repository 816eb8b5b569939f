"""Folders of transformers begin a run, and checkpoints are exported to them: both judged by transformers itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
)

from models.build import build_model
from models.config import Activation
from reprise.channel import single_rank_channel
from reprise.errors import TrainerError
from reprise.files import Files
from reprise.layout import Box
from reprise.live_tensors import LiveTensor
from tests.harness import TINY, built, compose, filled, launch, run_ok
from tests.unit.model_samples import fill
from trainer.commands import checkpoint as look
from trainer.commands import convert
from trainer.interop.hf import convert as hf
from trainer.interop.hf import load
from trainer.interop.hf.folder import open_folder
from trainer.launch.process_group import Cluster
from trainer.run.build import Run

SIZES = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "initializer_range": 0.2}
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 20, "n_inner": 44, "n_positions": 32, **SIZES}
LLAMA = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 20,
    "intermediate_size": 44,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    **SIZES,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 20000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 8,
}
# With a rate of 0 a step changes nothing: what is saved is what was loaded.
STILL = ["schedule.lr_warmup_iters=0", "schedule.min_lr=0.0", "optimizer.lr=0.0"]
OURS_GPT2 = ["model=gpt2_tiny", *TINY, "train.train_iters=1", *STILL, "checkpoint.finetune=true"]
OURS_LLAMA = [
    "model=llama3_tiny",
    *TINY,
    "model.n_kv_head=2",
    "train.train_iters=1",
    *STILL,
    "checkpoint.finetune=true",
]
OURS_STRETCHED = [
    "model=llama3_1b",
    "model.rope_scaling={factor:4.0,low_freq_factor:1.0,high_freq_factor:3.0,original_max_position_embeddings:8}",
    "model.rope_theta=20000.0",
    "model.vocab_size=257",
    "model.bos_token_id=256",
    "model.eos_token_id=256",
    *OURS_LLAMA[1:],
]
DEFAULT_THETA = [*OURS_LLAMA, "model.rope_theta=10000.0"]


def make(kind: str) -> PreTrainedModel:
    """Return a random model whose logits are far from zero."""
    torch.manual_seed(7)
    match kind:
        case "gpt2":
            return GPT2LMHeadModel(GPT2Config(**GPT2))
        case "gpt2-exact":
            return GPT2LMHeadModel(GPT2Config(**GPT2, activation_function="gelu"))
        case "gpt2-untied":
            return GPT2LMHeadModel(GPT2Config(**GPT2, tie_word_embeddings=False))
        case "gpt2-body":
            return GPT2Model(GPT2Config(**GPT2))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**LLAMA))
        case "llama-tied-stretched":
            return LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True, rope_parameters=STRETCHED))
        case "llama-body":
            return LlamaModel(LlamaConfig(**LLAMA, tie_word_embeddings=True))
    raise AssertionError(kind)


def save(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """Let transformers save a random model."""
    make(kind).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def run_in(folder: Path, overrides: list[str]) -> Run:
    """Return a run of one process that is to begin with a folder."""
    config = compose([*overrides, f"run.dir={folder}.run", f"checkpoint.load={folder}"])
    return built(config, Cluster(0, 1, torch.device("cpu"), 1, single_rank_channel(), "test"))


def loss_of(folder: Path, overrides: list[str]) -> float:
    """Return transformers' loss, in float32, on the very batch of our first iteration."""
    run = run_in(folder, overrides)
    config = run.config
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total = 0.0
    batches = run.train_data.train_batch(0, config.train.seed)
    for windows in batches:
        with torch.no_grad():
            logits = model(windows[:, :-1]).logits[..., : config.model.vocab_size]
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))
    return total / len(batches)


def first_loss(run: Path) -> float:
    return float.fromhex(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss_hex"])


CASES = {
    "gpt2": ("gpt2", torch.float32, "5GB", OURS_GPT2),
    "gpt2-exact-gelu": ("gpt2-exact", torch.float32, "5GB", [*OURS_GPT2, "model.activation=gelu"]),
    "gpt2-padded-here": ("gpt2", torch.float32, "5GB", [*OURS_GPT2, "model.pad_vocab_multiple=64"]),
    "gpt2-untied-float16-shards": (
        "gpt2-untied",
        torch.float16,
        "20KB",
        [*OURS_GPT2, "model.tie_word_embeddings=false"],
    ),
    "gpt2-body": ("gpt2-body", torch.float32, "5GB", OURS_GPT2),
    "llama-shards": ("llama", torch.float32, "20KB", DEFAULT_THETA),
    "llama-tied-stretched-bfloat16": ("llama-tied-stretched", torch.bfloat16, "5GB", OURS_STRETCHED),
    "llama-body": ("llama-body", torch.float32, "5GB", [*DEFAULT_THETA, "model.tie_word_embeddings=true"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_begins_with_the_loss_that_transformers_has(tmp_path: Path, case: str) -> None:
    kind, dtype, shard, overrides = CASES[case]
    folder = save(kind, tmp_path / "theirs", dtype=dtype, shard=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard != "5GB")
    ended = run_ok(tmp_path / "run", [*overrides, f"checkpoint.load={folder}"])
    assert f": weights from {folder}" in ended.text
    # float32 sums in another order, on a loss of about 6.
    assert abs(first_loss(tmp_path / "run") - loss_of(folder, overrides)) <= 1e-5

    saved = load_file(tmp_path / "run/checkpoints/iter_0000001/model.safetensors")
    theirs = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    prefix = "" if kind.split("-")[-1] != "body" else next(iter(saved)).split(".")[0] + "."
    assert saved.keys() == {prefix + name for name in theirs}
    assert all(torch.equal(saved[prefix + name], value.float()) for name, value in theirs.items())


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("gpt2", [*OURS_GPT2, "parallel=tp2", "model.pad_vocab_multiple=2"]),
        ("gpt2", [*OURS_GPT2, "parallel=pp2"]),
        ("llama", [*DEFAULT_THETA, "parallel=zero3"]),
        ("llama", [*DEFAULT_THETA, "parallel=tp2_sp", "model.pad_vocab_multiple=2"]),
    ],
    ids=["gpt2-tp2", "gpt2-pp2", "llama-zero3", "llama-tp2-sp"],
)
def test_every_topology_begins_with_the_loss_of_transformers(tmp_path: Path, kind: str, overrides: list[str]) -> None:
    folder = save(kind, tmp_path / "theirs", dtype=torch.bfloat16, shard="20KB")
    run_ok(tmp_path / "run", [*overrides, f"checkpoint.load={folder}"], ranks=2)
    assert abs(first_loss(tmp_path / "run") - loss_of(folder, [*overrides, "parallel=single"])) <= 1e-5
    saved = load_file(tmp_path / "run/checkpoints/iter_0000001/model.safetensors")
    theirs = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    assert saved.keys() == theirs.keys()
    assert all(torch.equal(saved[name], value.float()) for name, value in theirs.items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("gpt2", tmp_path_factory.mktemp("saved") / "gpt2")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of a folder of transformers that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "theirs"))


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder: Path, added: dict[str, torch.Tensor], *removed: str) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **added}
    save_file({name: value for name, value in tensors.items() if name not in removed}, path, {"format": "pt"})


def begin(folder: Path, overrides: list[str]) -> dict[str, torch.Tensor]:
    """Begin a run with a folder, and return its parameters by their stored names."""
    run = run_in(folder, overrides)
    try:
        run = filled(run)
        return {t.spec.name: t.local.detach().clone() for t in run.state.shards(with_optimizer=False)}
    finally:
        run.saves.close()


def refuse(folder: Path, *overrides: str, base: list[str] = OURS_GPT2) -> str:
    with pytest.raises(TrainerError) as caught:
        begin(folder, [*base, *overrides])
    return str(caught.value)


def test_without_finetune_the_folder_is_refused_with_that_advice(folder: Path, tmp_path: Path) -> None:
    ended = launch(tmp_path / "run", [*OURS_GPT2, "checkpoint.finetune=false", f"checkpoint.load={folder}"])
    assert ended.statuses == (1,)
    assert "MismatchError: The folder holds weights of transformers" in ended.text
    assert "set checkpoint.finetune=true" in ended.text
    assert "checkpoint.ckpt_step=3" in refuse(folder, "checkpoint.ckpt_step=3")


def test_all_model_differences_are_in_one_message_with_settings(folder: Path) -> None:
    change_config(folder, layer_norm_epsilon=1e-6, n_positions=64)
    text = refuse(folder, "model.n_layer=3", "model.tie_word_embeddings=false")
    assert "config.json" in text
    assert "model.n_layer: 2 there, 3 here  (model.n_layer=2 sets it)" in text
    assert "model.norm_eps: 1e-06 there (layer_norm_epsilon), 1e-05 here  (model.norm_eps=1e-06 sets it)" in text
    assert "model.max_position_embeddings: 64 there (n_positions), 32 here" in text
    assert "model.tie_word_embeddings: True there, False here  (model.tie_word_embeddings=true sets it)" in text
    assert "dropout" not in text
    assert "model of another family" in refuse(folder, base=OURS_LLAMA)


@pytest.mark.parametrize("theirs", ["gelu_new", "gelu_pytorch_tanh", "gelu"])
def test_the_activation_of_a_folder_must_be_the_one_configured(folder: Path, theirs: str) -> None:
    ours, other = ("gelu", "gelu_tanh") if theirs == "gelu" else ("gelu_tanh", "gelu")
    change_config(folder, activation_function=theirs)
    begin(folder, [*OURS_GPT2, f"model.activation={ours}"])
    text = refuse(folder, f"model.activation={other}")
    assert f"model.activation: {ours} there (activation_function), {other} here  (model.activation={ours} sets" in text


@pytest.mark.parametrize("theirs", ["gelu_fast", "quick_gelu", "gelu_python", "relu", None, ["gelu"]])
def test_other_activations_are_refused_by_name(folder: Path, theirs: object) -> None:
    change_config(folder, activation_function=theirs)
    text = refuse(folder, "model.activation=gelu")
    assert f"activation_function={theirs!r}: ours is 'gelu_new' or 'gelu_pytorch_tanh' or 'gelu'" in text


def test_an_exact_gelu_goes_to_transformers_and_comes_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ["model=gpt2_tiny", *TINY, "model.activation=gelu", "model.initializer_range=0.2"]
    run_ok(run, [*overrides, "train.train_iters=1", "schedule.lr_warmup_iters=0"])
    assert convert.main(["export", "hf", str(run), str(tmp_path / "slim")]) == 0
    for folder in (run / "checkpoints/iter_0000001", tmp_path / "slim"):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert model.config.activation_function == "gelu"
        config = compose([*overrides]).model
        ours = fill(build_model(config), load_file(folder / "model.safetensors"))
        tokens = torch.arange(16).view(2, 8) * 15
        with torch.no_grad():
            found, expected = ours(tokens), model(tokens).logits
            tanh = build_model(replace(config, activation=Activation.gelu_tanh))
            other = fill(tanh, load_file(folder / "model.safetensors"))(tokens)
        assert (found - expected).abs().max() <= 1e-5
        assert (other - expected).abs().max() > 1e-5  # the two forms are told apart
    slim, checkpoints = str(tmp_path / "slim"), str(tmp_path / "back")
    assert convert.main(["import", "hf", slim, checkpoints, "train.seq_length=16"]) == 0
    back = tmp_path / "back/iter_0000000"
    assert json.loads((back / "trainer_state.json").read_text())["model"]["activation"] == "gelu"
    assert json.loads((back / "config.json").read_text())["activation_function"] == "gelu"


def test_what_our_models_do_not_have_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    change_config(folder, activation_function="relu", scale_attn_by_inverse_layer_idx=True, n_head="two")
    text = refuse(folder)
    assert all(
        name in text for name in ("activation_function='relu'", "scale_attn_by_inverse_layer_idx", "n_head='two'")
    )
    llama = save("llama", tmp_path / "llama")
    change_config(llama, attention_bias=True, head_dim=12, rope_parameters={"rope_type": "yarn"})
    text = refuse(llama, base=OURS_LLAMA)
    assert all(name in text for name in ("attention_bias=True", "head_dim=12", "rope_type='yarn'"))
    change_config(llama, model_type="mistral")
    assert "expected gpt2, llama or qwen3, found 'mistral'" in refuse(llama, base=OURS_LLAMA)


def test_a_configuration_of_version_4_means_the_same(tmp_path: Path) -> None:
    folder = save("llama-tied-stretched", tmp_path / "theirs")
    expected = begin(folder, OURS_STRETCHED)
    stretched = {name: value for name, value in STRETCHED.items() if name not in ("rope_theta", "rope_type")}
    change_config(folder, rope_parameters=None, rope_theta=20000.0, rope_scaling={"type": "llama3", **stretched})
    found = begin(folder, OURS_STRETCHED)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert "model.rope_theta: 20000.0 there" in refuse(folder, "model.rope_theta=1.0", base=OURS_STRETCHED)
    assert "model.rope_scaling: {'factor': 4.0" in refuse(folder, "model.rope_scaling=null", base=OURS_STRETCHED)


def test_pickled_weights_are_refused_with_reason_and_remedy(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    text = refuse(folder)
    assert "loading a pickle can run code" in text
    assert "safe_serialization=True" in text
    (folder / "pytorch_model.bin").unlink()
    assert "holds no tensors" in refuse(folder)


def test_every_wrong_tensor_is_told_in_one_message(folder: Path) -> None:
    added = {
        "transformer.ln_f.bias": torch.zeros(21),
        "transformer.ln_f.weight": torch.zeros(20, dtype=torch.int32),
        "transformer.h.7.ln_1.bias": torch.zeros(20),
    }
    change_tensors(folder, added, "transformer.wpe.weight")
    text = refuse(folder)
    assert "transformer.wpe.weight is missing" in text
    assert "transformer.ln_f.bias has shape [21], the model has [20]" in text
    assert "transformer.ln_f.weight has dtype int32" in text
    assert "transformer.h.7.ln_1.bias is unexpected" in text


def test_old_buffers_and_the_second_tied_copy_are_left_out(folder: Path) -> None:
    expected = begin(folder, OURS_GPT2)
    table = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    buffers = {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 32, 32, dtype=torch.uint8) for layer in range(2)}
    buffers["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    change_tensors(folder, {**buffers, "lm_head.weight": table.clone()})
    found = begin(folder, OURS_GPT2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    change_tensors(folder, {"lm_head.weight": table + 1})
    assert "tied, and the folder holds two different ones" in refuse(folder)


def test_rows_that_pad_the_vocabulary_there_are_left_out(folder: Path) -> None:
    expected = begin(folder, OURS_GPT2)
    table = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    change_config(folder, vocab_size=320)
    change_tensors(folder, {"transformer.wte.weight": torch.cat((table, torch.ones(63, 20)))})
    found = begin(folder, [*OURS_GPT2, "model.pad_vocab_multiple=64"])
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert "model.vocab_size: 320 there, 257 here" in refuse(folder)


def test_links_are_followed_as_a_cache_is_made_of_them(folder: Path, tmp_path: Path) -> None:
    expected = begin(folder, OURS_GPT2)
    (tmp_path / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(tmp_path / "blobs" / name)
        (folder / name).symlink_to(tmp_path / "blobs" / name)
    found = begin(folder, OURS_GPT2)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_box_costs_what_it_needs_and_not_the_tensor(tmp_path: Path) -> None:
    folder = save("gpt2", tmp_path / "theirs")
    rows, width = 4096, 4096
    table = torch.arange(rows * width, dtype=torch.int32).view(rows, width).to(torch.bfloat16)
    change_tensors(folder, {"transformer.wte.weight": table})
    change_config(folder, vocab_size=rows)
    opened = open_folder(folder, Files())
    place = opened.places["transformer.wte.weight"]
    for box in (Box((1024, 0), (1024, width)), Box((0, 3072), (rows, 1024)), Box((7, 5), (3, 1))):
        local = torch.empty(box.shape)
        report = load.fill(opened, {place.spec.name: place}, [LiveTensor(place.spec, box, local, (0,))])
        assert torch.equal(local, table[box.slices].float())
        assert report.filled_bytes == 4 * box.numel
        # Runs of columns lie 6 KB apart, a gap that is read along.
        most = box.numel * 2 if box.offset[1] == 0 else (box.shape[0] - 1) * 2 * width + 2 * box.shape[1]
        assert report.read_bytes <= most


def test_damaged_files_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert "A safetensors header is malformed" in refuse(folder)
    path.write_bytes((1 << 60).to_bytes(8, "little") + whole[8:])
    assert "A safetensors header is damaged" in refuse(folder)
    path.write_bytes(b"abc")
    assert "model.safetensors" in refuse(folder)
    (folder / "config.json").write_text("{")
    assert "config.json" in refuse(folder)

    shards = save("gpt2", tmp_path / "shards", shard="20KB")
    index = shards / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    name, file = next(iter(table["weight_map"].items()))
    for bad in ("../model.safetensors", "none.safetensors", 7):
        index.write_text(json.dumps({**table, "weight_map": {**table["weight_map"], name: bad}}))
        assert str(bad) in refuse(shards)
    index.write_text(json.dumps({**table, "weight_map": {**table["weight_map"], "odd.weight": file}}))
    assert "A tensor is not in the file of the index" in refuse(shards)


def test_the_run_goes_on_from_its_own_checkpoint_once_it_has_one(folder: Path, tmp_path: Path) -> None:
    command = [*OURS_GPT2, f"checkpoint.load={folder}"]
    run_ok(tmp_path / "run", command)
    text = run_ok(tmp_path / "run", [*command, "train.train_iters=2", "checkpoint.override_scheduler=true"]).text
    assert "resumes from its own checkpoints" in text
    assert ": iteration 1 from" in text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of ours that is saved in several files, the longest run of tensors cut at 16 KB."""
    run = tmp_path_factory.mktemp("trained") / "run"
    run_ok(run, ["model=gpt2_tiny", *TINY, "train.train_iters=3", "checkpoint.file_bytes=16384"])
    return run


def tokenizer_file(folder: Path) -> Path:
    """Write a tokenizer of the 257 tokens that the models here have."""
    folder.mkdir()
    tokens = {**{byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}, "<|endoftext|>": 256}
    tokenizer = Tokenizer(BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_an_export_holds_weights_and_generates_the_same_text(trained: Path, tmp_path: Path) -> None:
    path, out = tokenizer_file(tmp_path / "tokenizer"), tmp_path / "out"
    assert convert.main(["export", "hf", str(trained), str(out), "--tokenizer", str(path)]) == 0
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(p.name for p in out.iterdir()) == names
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "tokenizer"]
    as_it_lies = AutoModelForCausalLM.from_pretrained(trained / "checkpoints/iter_0000003")
    exported, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    tokens = torch.tensor([AutoTokenizer.from_pretrained(out)("def f(x):").input_ids])
    assert tokens.tolist() == [Tokenizer.from_file(str(path)).encode("def f(x):").ids]
    with torch.no_grad():
        assert torch.equal(as_it_lies(tokens).logits, exported(tokens).logits)
    texts = [model.generate(tokens, max_new_tokens=6, do_sample=False).tolist() for model in (as_it_lies, exported)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_export_in_another_dtype_is_cast_once(trained: Path, tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "out"
    checkpoint = trained / "checkpoints/iter_0000003"
    assert convert.main(["export", "hf", str(checkpoint), str(out), "--dtype", dtype]) == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    found = load_file(out / "model.safetensors")
    masters = {name: value for path in checkpoint.glob("*.safetensors") for name, value in load_file(path).items()}
    assert found.keys() == masters.keys()
    assert all(torch.equal(found[name], value.to(getattr(torch, dtype))) for name, value in masters.items())
    assert AutoModelForCausalLM.from_pretrained(out).dtype == getattr(torch, dtype)


def test_a_large_export_is_sharded_with_an_index(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "FILE_BYTES", 16384)
    assert convert.main(["export", "hf", str(trained), str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    exported, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    as_it_lies = AutoModelForCausalLM.from_pretrained(trained / "checkpoints/iter_0000003").state_dict()
    assert all(torch.equal(value, as_it_lies[name]) for name, value in exported.state_dict().items())


def test_an_export_refuses_an_existing_path_and_fails_cleanly(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert convert.main(["export", "hf", str(trained), str(out)]) == 2
    assert "There is something already" in capsys.readouterr().err
    assert convert.main(["export", "hf", str(trained), str(tmp_path / "new"), "--tokenizer", str(out)]) == 2
    assert "There is no tokenizer" in capsys.readouterr().err
    assert convert.main(["export", "hf", str(out), str(tmp_path / "new")]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    assert convert.main(["export", "hf", str(trained), str(tmp_path / "none/new")]) == 2
    assert f"There is no folder to write to ({tmp_path / 'none'})" in capsys.readouterr().err
    checkpoint = Path(shutil.copytree(trained / "checkpoints/iter_0000003", tmp_path / "iter_0000003"))
    last = sorted(checkpoint.glob("model-*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1] + b"!")
    assert convert.main(["export", "hf", str(checkpoint), str(tmp_path / "new")]) == 2
    assert "A tensor is damaged" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", "out"]


def test_an_export_refuses_a_tokenizer_with_more_tokens(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tokenizer_file(tmp_path / "larger")
    path.write_text(path.read_text().replace('"<|endoftext|>": 256', '"<|endoftext|>": 257'))
    assert convert.main(["export", "hf", str(trained), str(tmp_path / "new"), "--tokenizer", str(path)]) == 2
    assert "expected model.vocab_size of at least 258, found 257" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_number_beyond_the_dtype_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save("gpt2", tmp_path / "theirs")
    change_tensors(folder, {"transformer.ln_f.bias": torch.full((20,), 1e5)})
    assert convert.main(["import", "hf", str(folder), str(tmp_path / "run"), *TINY]) == 0
    assert convert.main(["export", "hf", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "float16"]) == 2
    text = capsys.readouterr().err
    assert "A number is out of a dtype's range (transformer.ln_f.bias)" in text
    assert "found 100000.0. Take bfloat16 or float32." in text


def test_wrong_command_lines_are_refused_with_the_reason(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*arguments: object) -> str:
        assert convert.main([str(argument) for argument in arguments]) == 2
        return capsys.readouterr().err

    out = tmp_path / "run"
    assert "no model folder of transformers" in text("import", "hf", tmp_path / "none", out)
    assert "'abc' of type 'str'" in text("import", "hf", folder, out, "train.seq_length=abc")
    with pytest.raises(SystemExit):
        convert.main(["import", "hf"])
    assert "required: SOURCE, FOLDER\n" in capsys.readouterr().err
    assert not out.exists()


def test_a_path_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    ended = launch(tmp_path / "run", [*OURS_GPT2, f"checkpoint.load={'a' * 300}"])
    assert ended.statuses == (1,)
    assert "CheckpointError: A path cannot be read" in ended.text
    assert "Traceback" not in ended.text


def test_weights_imported_into_a_run_s_own_folder_begin_it_once(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert convert.main(["import", "hf", str(folder), str(run / "checkpoints"), *TINY[5:]]) == 0
    again = [*OURS_GPT2, f"checkpoint.load={run}/checkpoints", "checkpoint.save_interval=1", "train.train_iters=2"]
    first = run_ok(run, [*again, "train.exit_interval=1"])
    assert "iteration 0 from" in first.text
    assert "step     1/" in first.text
    second = run_ok(run, again)
    assert "resumes from its own checkpoints" in second.text
    assert "step     1/" not in second.text
    assert sorted(path.name for path in (run / "checkpoints").glob("iter_*")) == [f"iter_{n:07d}" for n in range(3)]


@pytest.mark.parametrize("kind", ["gpt2-body", "llama-tied-stretched"])
def test_a_run_resumes_from_an_imported_folder(tmp_path: Path, kind: str) -> None:
    folder = save(kind, tmp_path / "theirs", dtype=torch.bfloat16)
    run = tmp_path / "run"
    rest = [*TINY[5:], "train.train_iters=1", *STILL]
    assert convert.main(["import", "hf", str(folder), str(run / "checkpoints"), *rest]) == 0
    path = run / "checkpoints/iter_0000000"
    assert look.main(["verify", str(path)]) == 0
    report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)[1]
    assert not any(report.values()), report
    overrides = OURS_GPT2 if kind == "gpt2-body" else OURS_STRETCHED
    text = run_ok(run, [*overrides, f"checkpoint.load={path}", f"checkpoint.save={tmp_path / 'more'}"]).text
    assert f"iteration 0 from {path}" in text
    assert abs(first_loss(run) - loss_of(folder, overrides)) <= 1e-5
