"""A folder of transformers with the weights of two saves: every opening takes the file that transformers takes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from reprise.errors import CheckpointError
from reprise.files import Files
from tests.harness import run_ok
from tests.interop.test_hf import OURS_GPT2, begin, make
from trainer.commands import convert
from trainer.interop.hf.folder import open_folder
from trainer.interop.open_model import open_model

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of shards and their index, with another model in a single file beside them."""
    folder = tmp_path_factory.mktemp("twice") / "theirs"
    older = make("gpt2")
    older.save_pretrained(folder, max_shard_size="20KB")
    stale = {path: path.read_bytes() for path in [folder / INDEX, *folder.glob("model-*.safetensors")]}
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.add_(1.0)
    older.save_pretrained(folder)
    for path, content in stale.items():  # which this release of transformers removes, and others left
        path.write_bytes(content)
    return folder


def are_those_of_transformers(tensors: Tensors, folder: Path) -> bool:
    """Return whether all values are those that transformers loads; our tensors may have another view."""
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return all(torch.equal(value, expected[name].view_as(value)) for name, value in tensors.items())


def started(folder: Path, _scratch: Path) -> Tensors:
    return begin(folder, OURS_GPT2)


def imported(folder: Path, scratch: Path) -> Tensors:
    assert convert.main(["import", "hf", str(folder), str(scratch / "run"), "train.seq_length=16"]) == 0
    return load_file(scratch / "run/iter_0000000/model.safetensors")


def generated(folder: Path, _scratch: Path) -> Tensors:
    model, _ = open_model(folder, torch.device("cpu"))
    return dict(model.named_parameters())


def merged(folder: Path, scratch: Path) -> Tensors:
    """Return the weights beneath adapters that have not been trained."""
    text = run_ok(scratch / "run", [*OURS_GPT2, "model.lora.rank=2", f"checkpoint.load={folder}"]).text
    assert f"not used: {folder / INDEX}" in text
    command = ["export", "hf", "--merge", str(folder), str(scratch / "run"), str(scratch / "out")]
    assert convert.main(command) == 0
    return load_file(scratch / "out/model.safetensors")


@pytest.mark.parametrize("opened", [started, imported, generated, merged])
def test_a_single_file_wins_over_an_index_and_the_log_says(
    twice: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, opened: Callable[[Path, Path], Tensors]
) -> None:
    with caplog.at_level(logging.WARNING):
        tensors = opened(twice, tmp_path)
    assert are_those_of_transformers(tensors, twice)
    assert f"not used: {twice / INDEX}; the weights are those of {SINGLE}" in caplog.text


def test_an_index_of_shards_that_are_gone_does_not_matter(twice: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in ("config.json", SINGLE, INDEX):
        (folder / name).write_bytes((twice / name).read_bytes())
    assert are_those_of_transformers(begin(folder, OURS_GPT2), folder)


@pytest.mark.parametrize("named", [SINGLE, INDEX, "other.safetensors"])
def test_weights_that_a_configuration_names_come_first(twice: Path, tmp_path: Path, named: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    for path in twice.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "other.safetensors").write_bytes((folder / SINGLE).read_bytes())
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**table, "transformers_weights": named}))
    assert are_those_of_transformers(begin(folder, OURS_GPT2), folder)


@pytest.mark.parametrize("named", ["../model.safetensors", "model.bin", 7])
def test_weights_elsewhere_or_pickled_are_refused_by_name(twice: Path, tmp_path: Path, named: object) -> None:
    table = json.loads((twice / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**table, "transformers_weights": named}))
    with pytest.raises(CheckpointError, match="transformers_weights"):
        open_folder(tmp_path, Files())


def test_parts_by_rank_which_transformers_prefers_are_refused(twice: Path, tmp_path: Path) -> None:
    for name in ("config.json", SINGLE):
        (tmp_path / name).write_bytes((twice / name).read_bytes())
    assert open_folder(tmp_path, Files()).places
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="shard-00001-model-00001-of-00001"):
        open_folder(tmp_path, Files())
