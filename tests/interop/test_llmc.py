"""Weight files of llm.c, written from the description of the format, begin a run and come in with their logits."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.families import stored_tensors
from reprise.errors import CheckpointError, TrainerError
from reprise.format import Box, StoredDtype, TensorKind, TensorSpec
from reprise.tensors import LiveTensor
from tests.harness import compose
from tests.interop.states import (
    ALONE,
    begun,
    opened,
    overrides_of,
    random_state,
    write_hf,
    write_llmc,
)
from tests.messages import refused
from trainer.commands import convert
from trainer.interop.start import fill_live, fit_weights, open_weights

BF16 = torch.bfloat16
STILL = ["schedule.lr_warmup_iters=0", "train.train_iters=2", "checkpoint.finetune=true"]
# The scaling of rotary positions that a file can say.
SCALED = (
    "model.rope_scaling={factor:8.0,low_freq_factor:1.0,high_freq_factor:4.0,original_max_position_embeddings:8192}"
)
OURS = {
    "gpt2": [*overrides_of("gpt2"), *STILL],
    "llama": [*overrides_of("llama"), *STILL, SCALED, "model.rope_theta=500000.0", "model.norm_eps=1e-5"],
}


def written(path: Path, family: str, *, dtype: torch.dtype = torch.float32) -> Path:
    return write_llmc(path, random_state(compose(OURS[family]).model), dtype=dtype)


@pytest.mark.parametrize(("family", "dtype"), [("gpt2", BF16), ("llama", torch.float32)])
def test_an_import_has_the_weights_and_opens_in_transformers(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    state = random_state(compose(OURS[family]).model)
    path = written(tmp_path / "model.bin", family, dtype=dtype)
    assert convert.main(["import", "llmc", str(path), str(tmp_path / "run"), *ALONE]) == 0
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "run/iter_0000000", output_loading_info=True)
    assert not any(report.values()), report
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state.read(name).to(dtype).float()), name
    assert opened("llmc", path, ALONE).model == state.model


@pytest.mark.parametrize(
    ("kind", "family", "dtype"),
    [("file", "gpt2", torch.float32), ("file", "llama", BF16), ("folder", "gpt2", BF16), ("folder", "llama", BF16)],
)
def test_any_box_of_any_tensor_has_its_bits(tmp_path: Path, kind: str, family: str, dtype: torch.dtype) -> None:
    config, generator = compose(OURS[family]), torch.Generator().manual_seed(5)
    write = write_llmc if kind == "file" else write_hf
    state = random_state(config.model)
    path = write(tmp_path / "theirs", state, dtype=dtype)
    weights = fit_weights(open_weights(path), config.model, config.checkpoint)
    for name, stored in stored_tensors(config.model).items():
        expected = state.read(name).to(dtype).float().reshape(stored.view)
        spec = TensorSpec(TensorKind.MODEL, name, stored.shape, StoredDtype.F32, stored.view)
        for number in range(6):
            lo, end = torch.stack([torch.randint(s + 1, (2,), generator=generator).sort()[0] for s in stored.view], 1)
            if number == 0:
                lo, end = torch.zeros_like(lo), torch.tensor(stored.view)
            box = Box(tuple(lo.tolist()), tuple((end - lo).tolist()))
            local = torch.full(box.shape, torch.nan)
            fill_live(weights, [LiveTensor(spec, box, local, (0,))])
            assert torch.equal(local, expected[box.slices]), (name, box)


def begin(path: Path, *overrides: str, family: str = "gpt2") -> None:
    """Begin a run of one process with a file."""
    begun(*OURS[family], f"run.dir={path}.run", f"checkpoint.load={path}", *overrides)


def test_another_model_is_refused_with_all_differences(tmp_path: Path) -> None:
    path = written(tmp_path / "model.bin", "gpt2")
    begin(path)
    with refused(TrainerError, "model.n_layer", "saved 4", "model.norm_eps"):
        begin(path, "model.n_layer=2", "model.norm_eps=1e-6")
    with refused(TrainerError, "llama3"):
        begin(path, family="llama")
    with refused(TrainerError, "checkpoint.finetune=true"):
        begin(path, "checkpoint.finetune=false")
    with refused(TrainerError, "checkpoint.ckpt_step=3"):
        begin(path, "checkpoint.ckpt_step=3")


FOREIGN = {
    "tokens": (struct.pack("<256i", 20240520, 1, *[0] * 254), "data.train"),
    "safetensors": (struct.pack("<Q", 9) + json.dumps({"a": 1}).encode(), "safetensors"),
    "text": (b"hello, world", "68 65 6c 6c 6f 2c 20 77"),
    "nothing": (b"", "none"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_of_another_format_is_refused_with_those_accepted(tmp_path: Path, case: str) -> None:
    content, named = FOREIGN[case]
    (tmp_path / "model.bin").write_bytes(content)
    with refused(TrainerError, "model.bin", "20240326", "20240803", named):
        begin(tmp_path / "model.bin")


@pytest.mark.parametrize("family", OURS)
def test_headers_and_sizes_that_cannot_be_are_refused(tmp_path: Path, family: str) -> None:
    path = written(tmp_path / "model.bin", family)
    content = path.read_bytes()
    for cut in (content[:-1], content + b"\0", content[:1024]):
        path.write_bytes(cut)
        with refused(CheckpointError, "model.bin"):
            opened("llmc", path, ALONE)
    path.write_bytes(content[:4] + struct.pack("<i", 1) + content[8:])
    with refused(CheckpointError, "model.bin"):
        opened("llmc", path, ALONE)
    for member in range(2, 8):
        for number in (0, -5, 2**31 - 1):
            path.write_bytes(content[: 4 * member] + struct.pack("<i", number) + content[4 * member + 4 :])
            with pytest.raises(CheckpointError, match=f"={number}"):
                opened("llmc", path, ALONE)


def test_a_table_has_a_row_for_each_token(tmp_path: Path) -> None:
    path = written(tmp_path / "model.bin", "gpt2")
    content = path.read_bytes()
    path.write_bytes(content[:12] + struct.pack("<i", 400) + content[16:])
    with refused(CheckpointError, "padded_vocab_size=384", "vocab_size=400"):
        opened("llmc", path, ALONE)
