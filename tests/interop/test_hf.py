"""Folders of transformers begin a run, and exports open in transformers: both judged by transformers itself."""

from __future__ import annotations

import json
import re
import shutil
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
    PreTrainedModel,
)

from reprise.errors import CheckpointError, MismatchError, TrainerError
from tests.harness import TINY, compose
from tests.interop import states
from tests.messages import refused
from trainer.commands import convert
from trainer.interop.hf import convert as hf
from trainer.interop.hf.folder import open_folder
from trainer.interop.open_model import open_model
from trainer.interop.output import write_checkpoint
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
        case "gpt2-untied":
            return GPT2LMHeadModel(GPT2Config(**GPT2, tie_word_embeddings=False))
        case "gpt2-body":
            return GPT2Model(GPT2Config(**GPT2))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**LLAMA))
        case "llama-tied-stretched":
            return LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True, rope_parameters=STRETCHED))
    raise AssertionError(kind)


def save(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """Let transformers save a random model."""
    make(kind).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def run_in(folder: Path, overrides: list[str]) -> Run:
    """Return a run of one process that began with a folder, and has ended its saves."""
    return states.begun(*overrides, f"run.dir={folder}.run", f"checkpoint.load={folder}")


def begin(folder: Path, overrides: list[str]) -> dict[str, torch.Tensor]:
    """Begin a run with a folder, and return its parameters by their stored names, in their stored shapes."""
    shards = run_in(folder, overrides).state.shards(with_optimizer=False)
    return {t.spec.name: t.local.detach().clone().reshape(t.spec.shape) for t in shards}


def assert_those_of_transformers(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in tensors.items())


CASES = {
    "gpt2": ("gpt2", torch.float32, "5GB", OURS_GPT2),
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
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_begins_with_the_logits_of_transformers(tmp_path: Path, case: str) -> None:
    kind, dtype, shard, overrides = CASES[case]
    folder = save(kind, tmp_path / "theirs", dtype=dtype, shard=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard != "5GB")
    run = run_in(folder, overrides)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(257, (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = run.state.parts[0].model(tokens)[..., :257], model(tokens).logits
    # float32 sums in another order, on logits of up to 5.
    assert (found - expected).abs().max() <= 1e-5
    assert expected.abs().max() > 1
    theirs = model.state_dict()
    for tensor in run.state.shards(with_optimizer=False):
        stored = theirs[tensor.spec.name]
        assert torch.equal(tensor.local[tuple(map(slice, tensor.spec.view))].reshape(stored.shape), stored)


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
    path = folder / SINGLE
    tensors = {**load_file(path), **added}
    save_file({name: value for name, value in tensors.items() if name not in removed}, path, {"format": "pt"})


# ---- the model of a folder

REFUSED: dict[str, tuple[dict[str, object], list[str], list[str]]] = {
    "settings": (
        {"layer_norm_epsilon": 1e-6, "n_positions": 64},
        ["model.n_layer=3", "model.tie_word_embeddings=false"],
        ["model.n_layer", "saved 1e-06", "model.max_position_embeddings", "model.tie_word_embeddings"],
    ),
    "another family": ({}, OURS_LLAMA, ["llama3"]),
    "no finetune": ({}, ["checkpoint.finetune=false"], ["checkpoint.finetune=true"]),
    "an iteration": ({}, ["checkpoint.ckpt_step=3"], ["checkpoint.ckpt_step=3"]),
    "exact here": ({}, ["model.activation=gelu"], ["model.activation", "gelu_tanh"]),
    "exact there": ({"activation_function": "gelu"}, [], ["model.activation", "saved gelu"]),
    "a huge number": ({"layer_norm_epsilon": 1e300}, [], ["norm_eps"]),
    "no float": ({"n_embd": 10**400}, [], ["n_embd"]),
    "more rows": ({"vocab_size": 320}, [], ["model.vocab_size"]),
    "other files": ({"transformers_weights": "model.bin"}, [], ["transformers_weights"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_model_is_refused_with_all_that_differs(folder: Path, case: str) -> None:
    config, overrides, named = REFUSED[case]
    change_config(folder, **config)
    base = [] if case == "another family" else OURS_GPT2
    with refused(TrainerError, *named):
        begin(folder, [*base, *overrides])


# ---- the tensors of a folder


def test_every_wrong_tensor_is_told_in_one_message(folder: Path) -> None:
    added = {
        "transformer.ln_f.bias": torch.zeros(21),
        "transformer.ln_f.weight": torch.zeros(20, dtype=torch.int32),
        "transformer.h.7.ln_1.bias": torch.zeros(20),
    }
    change_tensors(folder, added, "transformer.wpe.weight")
    with refused(MismatchError, *added, "transformer.wpe.weight", "[21]", "int32"):
        begin(folder, OURS_GPT2)


def test_old_buffers_and_the_second_tied_copy_are_left_out(folder: Path, saved: Path) -> None:
    table = load_file(folder / SINGLE)["transformer.wte.weight"]
    buffers = {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 32, 32, dtype=torch.uint8) for layer in range(2)}
    buffers["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    change_tensors(folder, {**buffers, "lm_head.weight": table.clone()})
    assert_those_of_transformers(begin(folder, OURS_GPT2), saved)
    change_tensors(folder, {"lm_head.weight": table + 1})
    with refused(MismatchError, "lm_head.weight"):
        begin(folder, OURS_GPT2)


def test_rows_that_pad_the_vocabulary_there_are_left_out(folder: Path) -> None:
    change_config(folder, vocab_size=320)
    table = load_file(folder / SINGLE)["transformer.wte.weight"]
    change_tensors(folder, {"transformer.wte.weight": torch.cat((table, torch.ones(63, 20)))})
    run = run_in(folder, [*OURS_GPT2, "model.pad_vocab_multiple=64"])
    (found,) = (t.local for t in run.state.shards(with_optimizer=False) if t.spec.name == "transformer.wte.weight")
    assert torch.equal(found[:257], table)


def resident(path: Path) -> int:
    """Return the bytes of a mapped file that this process has touched."""
    blocks = re.split(r"^[0-9a-f]+-[0-9a-f]+ ", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    return sum(1024 * int(m[1]) for b in blocks if str(path) in b and (m := re.search(r"^Rss: +(\d+)", b, re.M)))


def test_a_box_costs_what_it_needs_and_not_the_tensor(folder: Path) -> None:
    rows, width = 4096, 4096
    table = torch.arange(rows * width, dtype=torch.int32).view(rows, width).to(torch.bfloat16)
    change_tensors(folder, {"transformer.wte.weight": table[:, :20].contiguous(), "transformer.wpe.weight": table})
    tensor = open_folder(folder).tensors["transformer.wpe.weight"].read()
    assert torch.equal(tensor[1024:1060, 7:9].float(), table[1024:1060, 7:9].float())
    assert resident(folder / SINGLE) < table.nbytes / 8


# ---- the files of a folder


def test_other_files_than_weights_are_refused_by_name(folder: Path) -> None:
    path = folder / SINGLE
    content = path.read_bytes()
    path.write_bytes((1 << 60).to_bytes(8, "little") + content[8:])
    with refused(CheckpointError, SINGLE):
        begin(folder, OURS_GPT2)
    path.write_bytes(content)
    (folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")  # which transformers prefers
    with refused(CheckpointError, "shard-00001-model-00001-of-00001"):
        begin(folder, OURS_GPT2)
    (folder / "shard-00001-model-00001-of-00001.safetensors").unlink()
    path.rename(folder / "pytorch_model.bin")
    with refused(TrainerError, "safe_serialization=True"):
        begin(folder, OURS_GPT2)


@pytest.mark.parametrize(
    ("tensor", "file"),
    [(0, "../model.safetensors"), (0, "none.safetensors"), (0, 7), ("odd.weight", None)],
)
def test_an_index_that_names_what_is_not_there_is_refused(tmp_path: Path, tensor: object, file: object) -> None:
    folder = save("gpt2", tmp_path / "shards", shard="20KB")
    table = json.loads((folder / INDEX).read_text())
    first, held = next(iter(table["weight_map"].items()))
    entry = {first if tensor == 0 else tensor: held if file is None else file}
    (folder / INDEX).write_text(json.dumps({**table, "weight_map": {**table["weight_map"], **entry}}))
    with refused(TrainerError, str(file or tensor)):
        begin(folder, OURS_GPT2)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = save("gpt2", tmp_path / "shards", shard="20KB")
    first, second, *_ = sorted(folder.glob("model-*"))
    save_file({**load_file(first), **load_file(second)}, first)
    with refused(CheckpointError, "two files"):
        begin(folder, OURS_GPT2)


@pytest.fixture
def twice(folder: Path, tmp_path: Path) -> Path:
    """Return a folder with another model in a single file beside its shards, as older transformers leave them."""
    for path in save("gpt2", tmp_path / "shards", shard="20KB").glob("model*"):
        (folder / path.name).write_bytes(path.read_bytes())
    change_tensors(folder, {name: value + 1 for name, value in load_file(folder / SINGLE).items()})
    return folder


def test_a_single_file_wins_over_an_index(twice: Path, tmp_path: Path) -> None:
    assert_those_of_transformers(begin(twice, OURS_GPT2), twice)
    assert convert.main(["import", "hf", str(twice), str(tmp_path / "run"), "train.seq_length=16"]) == 0
    assert_those_of_transformers(load_file(tmp_path / f"run/iter_0000000/{SINGLE}"), twice)
    model, _ = open_model(twice, torch.device("cpu"))
    assert torch.equal(model.lm_head.weight, load_file(twice / SINGLE)["transformer.wte.weight"])


# ---- exports


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of ours in several files, the longest run of tensors cut at 16 KB."""
    overrides = [*states.overrides_of("gpt2"), "checkpoint.file_bytes=16384"]
    return write_checkpoint(states.state_of("gpt2"), tmp_path_factory.mktemp("made"), compose(overrides))


def tokenizer_file(folder: Path, end: int = 256) -> Path:
    """Write a tokenizer of the 257 tokens that the models here have."""
    folder.mkdir()
    tokens = {**{byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}, "<|endoftext|>": end}
    tokenizer = Tokenizer(BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_transformers_opens_an_export_cast_once(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(hf, "FILE_BYTES", 16384)
    path, out = tokenizer_file(tmp_path / "tokenizer"), tmp_path / "out"
    assert convert.main(["export", "hf", str(made), str(out), "--tokenizer", str(path), "--dtype", dtype]) == 0
    assert len(list(out.glob("model-*.safetensors"))) > 1
    names = {p.name for p in out.iterdir() if p.suffix != ".safetensors"}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", INDEX}
    exported, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert exported.dtype == getattr(torch, dtype)
    as_it_lies = AutoModelForCausalLM.from_pretrained(made).state_dict()
    assert all(torch.equal(as_it_lies[n].to(exported.dtype), value) for n, value in exported.state_dict().items())
    tokens = AutoTokenizer.from_pretrained(out)("def f(x):").input_ids
    assert tokens == Tokenizer.from_file(str(path)).encode("def f(x):").ids


def test_tokenizers_and_numbers_that_do_not_fit_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, larger = tmp_path / "new", tokenizer_file(tmp_path / "larger", end=257)
    for path, named in ((larger, "model.vocab_size"), (tmp_path, "tokenizer")):
        assert convert.main(["export", "hf", str(made), str(out), "--tokenizer", str(path)]) == 2
        assert named in capsys.readouterr().err
    state = states.changed(states.state_of("gpt2"), transformer__ln_f__bias=torch.full((24,), 1e5))
    source = write_checkpoint(state, tmp_path / "run", compose(states.overrides_of("gpt2")))
    assert convert.main(["export", "hf", str(source), str(out), "--dtype", "float16"]) == 2
    text = capsys.readouterr().err
    assert "transformer.ln_f.bias" in text
    assert "100000.0" in text
    assert not out.exists()


def test_wrong_command_lines_are_refused_with_the_reason(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases: list[tuple[object, list[str], str]] = [(tmp_path / "none", [], "none")]
    cases += [(folder, ["train.seq_length=abc"], "'abc'"), ("a" * 300, [], "a" * 300)]
    for source, more, named in cases:
        assert convert.main(["import", "hf", str(source), str(tmp_path / "run"), *more]) == 2
        assert named in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convert.main(["import", "hf"])
    assert "SOURCE, FOLDER" in capsys.readouterr().err
