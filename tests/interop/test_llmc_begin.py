"""Weight files of llm.c begin a run, on any topology, with the bits that an import of them has."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from models.families import stored_tensors
from reprise.channel import single_rank_channel
from reprise.errors import TrainerError
from reprise.files import Files
from reprise.layout import Box, StoredDtype, TensorKind, TensorSpec
from reprise.live_tensors import LiveTensor
from tests.harness import TINY, built, compose, curve, filled, launch, run_ok, tensor_files
from tests.interop.test_llmc import (
    GPT2_HEADER,
    LLAMA_HEADER,
    gpt2_order,
    llama_order,
    make_gpt2,
    make_llama,
    write_file,
)
from trainer.commands import convert
from trainer.interop.llmc.file import open_file, read_whole
from trainer.interop.llmc.load import fill
from trainer.launch.process_group import Cluster

SHAPE = [*TINY, "model.n_layer=3", "model.n_head=4", "model.n_embd=24", "train.train_iters=2"]
SHAPE += ["schedule.lr_warmup_iters=0", "checkpoint.finetune=true"]
GPT2 = ["model=gpt2_tiny", *SHAPE, "model.intermediate_size=96", "model.dropout=0.0"]
LLAMA = ["model=llama3_1b", *SHAPE, "model.intermediate_size=40", "model.n_kv_head=2", "model.vocab_size=257"]
LLAMA += ["model.rope_theta=500000.0", "model.tie_word_embeddings=false", "model.bos_token_id=256"]
LLAMA += ["model.eos_token_id=256"]
LLAMA += ["model.rope_scaling={factor:8.0,low_freq_factor:1.0,high_freq_factor:4.0,"]
LLAMA[-1] += "original_max_position_embeddings:8192}"
TENSOR = ["parallel=tp2", "model.pad_vocab_multiple=2"]
MADE = {"gpt2": (GPT2_HEADER, gpt2_order, make_gpt2), "llama": (LLAMA_HEADER, llama_order, make_llama)}
OURS = {"gpt2": GPT2, "llama": LLAMA}


def written(path: Path, family: str, *, version: int = 3) -> Path:
    header, order, make = MADE[family]
    return write_file(path, header, order(make().state_dict()), version=version)


@pytest.mark.parametrize("version", [3, 5])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_any_box_of_any_tensor_has_its_bits_at_its_own_cost(tmp_path: Path, family: str, version: int) -> None:
    file = open_file(written(tmp_path / "model.bin", family, version=version), Files())
    config, generator = compose(OURS[family]).model, torch.Generator().manual_seed(5)
    for name, stored in stored_tensors(config).items():
        expected = read_whole(file, name).float().reshape(stored.view)
        spec = TensorSpec(TensorKind.MODEL, name, stored.shape, StoredDtype.F32, stored.view)
        for number in range(6):
            lo = [int(torch.randint(size, (), generator=generator)) for size in stored.view]
            end = [
                int(torch.randint(at, size + 1, (), generator=generator))
                for at, size in zip(lo, stored.view, strict=True)
            ]
            if number == 0:
                lo, end = [0] * len(lo), list(stored.view)
            box = Box(tuple(lo), tuple(hi - at for at, hi in zip(lo, end, strict=True)))
            local = torch.full(box.shape, torch.nan)
            report = fill(file, [LiveTensor(spec, box, local, (0,))])
            assert torch.equal(local, expected[box.slices]), (name, box)
            assert report.filled_bytes == 4 * box.numel
            assert report.read_bytes <= expected.numel() * file.dtype.itemsize * 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.nightly)])
def test_a_run_from_a_file_has_losses_and_bits_of_the_import(tmp_path: Path, family: str) -> None:
    path, ours = written(tmp_path / "weights", family), OURS[family]
    assert convert.main(["import", "llmc", str(path), str(tmp_path / "imported"), *TINY[5:]]) == 0
    for name, layout, ranks in (("one", [], 1), ("tp2", TENSOR, 2), ("zero3", ["parallel=zero3"], 2)):
        runs = []
        for kind, source in (("file", path), ("imported", tmp_path / "imported")):
            runs.append(tmp_path / f"{name}-{kind}")
            text = run_ok(runs[-1], [*ours, *layout, f"checkpoint.load={source}"], ranks=ranks).text
            assert str(source) in text
        direct, expected = (curve(run) for run in runs)
        assert len(direct) == 2
        assert direct == expected, name
        last = [tensor_files(run / "checkpoints/iter_0000002") for run in runs]
        assert last[0] == last[1], name


@pytest.mark.slow
def test_the_same_command_goes_on_from_the_run_s_own_checkpoint(tmp_path: Path) -> None:
    command = [*GPT2, f"checkpoint.load={written(tmp_path / 'model.bin', 'gpt2')}", "checkpoint.save_interval=1"]
    assert "weights from" in run_ok(tmp_path / "run", [*command, "train.exit_interval=1"]).text
    text = run_ok(tmp_path / "run", command).text
    assert "resumes from its own checkpoints" in text
    assert ": iteration 1 from" in text


def refusal(path: Path, *overrides: str, base: list[str] = GPT2) -> str:
    config = compose([*base, f"run.dir={path}.run", f"checkpoint.load={path}", *overrides])
    run = built(config, Cluster(0, 1, torch.device("cpu"), 1, single_rank_channel(), "test"))
    try:
        with pytest.raises(TrainerError) as caught:
            run = filled(run)
        return str(caught.value)
    finally:
        run.saves.close()


def test_another_model_is_refused_with_all_differences(tmp_path: Path) -> None:
    path = written(tmp_path / "model.bin", "gpt2")
    text = refusal(path, "model.n_layer=2", "model.norm_eps=1e-6")
    assert "The file holds another model than the one configured" in text
    assert "model.n_layer: 3 there, 2 here  (model.n_layer=3 sets it)" in text
    assert "model.norm_eps: 1e-05 there, 1e-06 here" in text
    assert "The file holds a model of another family" in refusal(path, base=LLAMA)
    assert "set checkpoint.finetune=true" in refusal(path, "checkpoint.finetune=false")
    assert "checkpoint.ckpt_step=3" in refusal(path, "checkpoint.ckpt_step=3")


FOREIGN = {
    "a zip": (b"PK\x03\x04rest", "a zip archive, such as torch.save writes"),
    "tokens": (struct.pack("<256i", 20240520, 1, *[0] * 254), "tokens, which data.train reads"),
    "the optimizer of llm.c": (struct.pack("<i", 20240527), "optimizer state of llm.c"),
    "safetensors": (struct.pack("<Q", 9) + json.dumps({"a": 1}).encode(), "a safetensors file; name its folder"),
    "JSON": (b'{"weight_map": {}}', "JSON; name its folder"),
    "text": (b"hello, world", "1819043176, of the bytes 68 65 6c 6c 6f 2c 20 77"),
    "nothing": (b"", "0, of the bytes none"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_of_another_format_is_refused_with_those_accepted(tmp_path: Path, case: str) -> None:
    path = tmp_path / "model.bin"
    content, found = FOREIGN[case]
    path.write_bytes(content)
    text = refusal(path)
    assert f"A run cannot start from a file of this format ({path})" in text
    assert "20240326 or 20240803" in text
    assert found in text
    assert "a transformers folder" in text


def test_a_file_cut_short_is_refused_on_every_rank(tmp_path: Path) -> None:
    path = written(tmp_path / "model.bin", "gpt2")
    path.write_bytes(path.read_bytes()[:-4])
    ended = launch(tmp_path / "run", [*GPT2, "parallel=zero3", f"checkpoint.load={path}"], ranks=2)
    assert not any(status == 0 for status in ended.statuses)
    assert "CheckpointError: A file of weights has another size" in ended.text
    assert "Traceback" not in ended.text
