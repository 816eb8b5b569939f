"""Weight files of llm.c, against a writer, a reader and a forward pass made here from the description of the format.

The description: https://github.com/karpathy/llm.c, `train_gpt2.py` and `train_llama3.py`, `write_model`. transformers
says what the logits of the weights are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from reprise.errors import CheckpointError
from tests.harness import TINY, compose, run_ok
from trainer.commands import checkpoint as look
from trainer.commands import convert
from trainer.interop.formats import ImportOptions
from trainer.interop.llmc import convert as llmc

WIDTH, LAYERS, HEADS, GROUPS, INNER, ROWS = 24, 3, 4, 2, 40, 257
ASKED = ImportOptions(compose([]))
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def make_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": 32, "vocab_size": ROWS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=256, eos_token_id=256, initializer_range=0.2))
    return shaken(model)


def make_llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        vocab_size=ROWS,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        bos_token_id=256,
        eos_token_id=256,
        initializer_range=0.2,
        rope_parameters=SCALED,
    )
    return shaken(LlamaForCausalLM(config))


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """Make biases and norms differ from each other, so that none can be taken for another."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return model.eval()


def rounded(model: PreTrainedModel) -> None:
    """Round the weights, and nothing else that the model has, to bfloat16."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def gpt2_order(state: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield what the description lists for GPT-2, in that order."""
    yield F.pad(state["transformer.wte.weight"], (0, 0, 0, -ROWS % 128))
    yield state["transformer.wpe.weight"]
    kinds = "ln_1.weight ln_1.bias attn.c_attn.weight attn.c_attn.bias attn.c_proj.weight attn.c_proj.bias "
    kinds += "ln_2.weight ln_2.bias mlp.c_fc.weight mlp.c_fc.bias mlp.c_proj.weight mlp.c_proj.bias"
    for kind in kinds.split():
        for layer in range(LAYERS):
            value = state[f"transformer.h.{layer}.{kind}"]
            yield value.t() if value.ndim == 2 else value
    yield state["transformer.ln_f.weight"]
    yield state["transformer.ln_f.bias"]


def llama_order(state: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield what the description lists for LLaMA-3, in that order."""

    def interleave(value: torch.Tensor) -> torch.Tensor:
        heads = value.split(WIDTH // HEADS)
        return torch.cat([torch.stack(head.chunk(2), dim=1).reshape(head.shape) for head in heads])

    def layers(make: Callable[[str], torch.Tensor]) -> Iterator[torch.Tensor]:
        return (make(f"model.layers.{layer}.") for layer in range(LAYERS))

    def qkv(at: str) -> torch.Tensor:
        q, k, v = (state[f"{at}self_attn.{name}_proj.weight"] for name in "qkv")
        return torch.cat((interleave(q), interleave(k), v))

    yield state["model.embed_tokens.weight"]
    yield from layers(lambda at: state[f"{at}input_layernorm.weight"])
    yield from layers(qkv)
    for name in ("self_attn.o_proj", "post_attention_layernorm", "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj"):
        yield from layers(lambda at, name=name: state[f"{at}{name}.weight"])
    yield state["model.norm.weight"]
    yield state["lm_head.weight"]


def bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


GPT2_HEADER = [20240326, 3, 32, ROWS, LAYERS, HEADS, WIDTH, 384]
# As llm.c writes it: what is no integer is truncated to one.
LLAMA_HEADER = [20240803, 3, 32, ROWS, LAYERS, HEADS, GROUPS, WIDTH, 1, 8, 0, 500000, 1, 4, 3, 1]


def write_file(path: Path, header: list[int], tensors: Iterator[torch.Tensor], *, version: int = 3) -> Path:
    dtype = {3: torch.float32, 5: torch.bfloat16}[version]
    header = [header[0], version, *header[2:]]
    with path.open("wb") as file:
        file.write(struct.pack("<256i", *header, *[0] * (256 - len(header))))
        for tensor in tensors:
            file.write(bytes(tensor.detach().to(dtype).contiguous().view(torch.uint8).numpy().data))
    return path


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    tokens = torch.randint(ROWS, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(tokens).logits


def bring_in(path: Path, run: Path) -> PreTrainedModel:
    """Import a file, and return what transformers makes of the checkpoint as it lies."""
    assert convert.main(["import", "llmc", str(path), str(run / "checkpoints"), *TINY[5:]]) == 0
    assert look.main(["verify", str(run)]) == 0
    model, report = AutoModelForCausalLM.from_pretrained(run / "checkpoints/iter_0000000", output_loading_info=True)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("version", [3, 5])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_imported_file_has_its_model_s_weights_and_logits(tmp_path: Path, family: str, version: int) -> None:
    theirs = make_gpt2() if family == "gpt2" else make_llama()
    if version == 5:
        rounded(theirs)
    order, header = (gpt2_order, GPT2_HEADER) if family == "gpt2" else (llama_order, LLAMA_HEADER)
    path = write_file(tmp_path / "model.bin", header, order(theirs.state_dict()), version=version)
    found = bring_in(path, tmp_path / "run")
    expected = theirs.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    assert torch.equal(logits_of(found), logits_of(theirs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_exported_file_is_byte_for_byte_as_described(tmp_path: Path, family: str, dtype: str) -> None:
    run, sizes = tmp_path / "run", [f"model.n_embd={WIDTH}", "model.n_head=4", "train.train_iters=2"]
    sizes += ["schedule.lr_warmup_iters=0", f"model.n_layer={LAYERS}"]
    version = 3 if dtype == "float32" else 5
    if family == "gpt2":
        run_ok(run, ["model=gpt2_tiny", *TINY, *sizes, "model.intermediate_size=96", "model.pad_vocab_multiple=64"])
        header, order = GPT2_HEADER, gpt2_order
    else:
        run_ok(run, ["model=llama3_tiny", *TINY, *sizes, "model.intermediate_size=40", "model.n_kv_head=2"])
        multiplier = (40 + 0.25) / (8 * WIDTH // 3)
        header = [*LLAMA_HEADER[:8], bits(multiplier), 8, bits(1e-5), bits(500000.0), 0, 4, 3, 0]
        order = llama_order
    assert convert.main(["export", "llmc", str(run), str(tmp_path / "out.bin"), "--dtype", dtype]) == 0
    masters = AutoModelForCausalLM.from_pretrained(run / "checkpoints/iter_0000002")
    expected = write_file(tmp_path / "expected.bin", header, order(masters.state_dict()), version=version)
    assert (tmp_path / "out.bin").read_bytes() == expected.read_bytes()

    found = bring_in(tmp_path / "out.bin", tmp_path / "back")
    if dtype == "bfloat16":
        rounded(masters)
    assert torch.equal(logits_of(found), logits_of(masters))


def llama_forward(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of a file of LLaMA-3, float32, whose rotation turns adjacent pairs as complex numbers.

    Source: the reference code of LLaMA 3 (`apply_rotary_emb`), whose order of rows such files have.
    """
    numbers = torch.frombuffer(bytearray(path.read_bytes()[1024:]), dtype=torch.float32)
    at = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        size = torch.Size(shape).numel()
        at += size
        return numbers[at - size : at].view(shape)

    head = WIDTH // HEADS
    table, first = take(ROWS, WIDTH), take(LAYERS, WIDTH)
    fused, out = take(LAYERS, (HEADS + 2 * GROUPS) * head, WIDTH), take(LAYERS, WIDTH, WIDTH)
    second, up, gate = take(LAYERS, WIDTH), take(LAYERS, INNER, WIDTH), take(LAYERS, INNER, WIDTH)
    down, norm, output = take(LAYERS, WIDTH, INNER), take(WIDTH), take(ROWS, WIDTH)
    assert at == len(numbers)
    turns = torch.outer(torch.arange(tokens.shape[1]), 500000.0 ** (-torch.arange(0, head, 2) / head))
    rotation = torch.polar(torch.ones_like(turns), turns)[:, None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * rotation).flatten(-2)

    x = table[tokens]
    for layer in range(LAYERS):
        h = F.linear(F.rms_norm(x, (WIDTH,), first[layer], 1e-5), fused[layer]).unflatten(-1, (-1, head))
        q, k, v = h.split((HEADS, GROUPS, GROUPS), dim=-2)
        heads = [part.transpose(1, 2) for part in (rotated(q), rotated(k), v)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).flatten(2), out[layer])
        h = F.rms_norm(x, (WIDTH,), second[layer], 1e-5)
        x = x + F.linear(F.silu(F.linear(h, gate[layer])) * F.linear(h, up[layer]), down[layer])
    return F.linear(F.rms_norm(x, (WIDTH,), norm, 1e-5), output)


def test_rotating_pairs_gives_the_logits_of_an_exported_file(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = make_llama().config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    theirs = shaken(LlamaForCausalLM(config))
    theirs.save_pretrained(tmp_path / "hf")
    run, out = tmp_path / "run", tmp_path / "out.bin"
    assert convert.main(["import", "hf", str(tmp_path / "hf"), str(run), *TINY[5:]]) == 0
    assert convert.main(["export", "llmc", str(run), str(out)]) == 0
    tokens = torch.randint(ROWS, (2, 16), generator=torch.Generator().manual_seed(1))
    expected = logits_of(theirs)
    # float32 sums in another order, on logits of up to 4.5.
    assert (llama_forward(out, tokens) - expected).abs().max() <= 1e-5
    assert expected.abs().max() > 1


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        llmc.read_source(path, ASKED)
    return str(caught.value)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    for header, order, model in (
        (GPT2_HEADER, gpt2_order, make_gpt2()),
        (LLAMA_HEADER, llama_order, make_llama()),
    ):
        whole = write_file(path, header, order(model.state_dict())).read_bytes()
        for wrong in (whole[:-4], whole[:-1], whole + b"\0", whole[:1024], whole[: len(whole) // 2]):
            path.write_bytes(wrong)
            assert "has another size" in refusal(path)
        path.write_bytes(whole[:1000])
        assert "too short for a header" in refusal(path)
        path.write_bytes(b"PK\3\4" + whole[4:])
        assert "not a weight file of llm.c" in refusal(path)
        path.write_bytes(whole[:4] + struct.pack("<i", 1) + whole[8:])
        assert "another version" in refusal(path)
        for member in range(2, 8):
            for number in (0, -5, 2**31 - 1):
                path.write_bytes(whole[: 4 * member] + struct.pack("<i", number) + whole[4 * member + 4 :])
                assert f"={number}: must be 1 to" in refusal(path)
    assert "No such file" in refusal(tmp_path / "none.bin")


def test_a_file_that_claims_a_size_is_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_file(tmp_path / "model.bin", [20240326, 3, 1 << 24, 1 << 24, 9999, 1, 1 << 24, 1 << 24], iter(()))
    assert "has another size" in refusal(path)
    assert convert.main(["import", "llmc", str(path), str(tmp_path / "never"), *TINY[5:]]) == 2
    assert "CheckpointError: A file of weights has another size" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


def test_models_that_a_file_cannot_say_are_refused_all_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out.bin"
    overrides = ["model=gpt2_tiny", *TINY, "model.norm_eps=1e-6", "model.tie_word_embeddings=false"]
    overrides.append("model.activation=gelu")
    run_ok(run, [*overrides, "train.train_iters=1", "schedule.lr_warmup_iters=0"])
    assert convert.main(["export", "llmc", str(run), str(out), "--dtype", "float16"]) == 2
    text = capsys.readouterr().err
    for name in (
        "activation=gelu",
        "tie_word_embeddings",
        "intermediate_size=44",
        "norm_eps=1e-06",
        "float32 or bfloat16",
    ):
        assert name in text
    assert convert.main(["export", "llmc", str(run), str(out), "--tokenizer", str(run)]) == 2
    assert "Leave --tokenizer out" in capsys.readouterr().err
    assert not out.exists()
