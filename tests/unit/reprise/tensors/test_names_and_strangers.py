"""A checkpoint is what its name says, and nobody else's loader reads something else from its folder."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from reprise.errors import CheckpointError
from reprise.loading.reader import misleading_files, open_checkpoint
from reprise.ranks.channel import single_rank_channel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import SavePolicy
from reprise.storage.files import Files
from tests.messages import refused
from tests.unit.reprise.loading.test_reader import contents, load, save
from trainer.commands import checkpoint as script


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder with iterations 10 and 20."""
    for iteration in (10, 20):
        save(tmp_path, iteration)
    return tmp_path


def test_a_copy_named_after_another_iteration_is_skipped(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(run / "iter_0000020", run / "iter_0000100")
    assert load(run)[0] == 20
    assert (
        "iter_0000100 is damaged and skipped: The checkpoint folder's name does not match its iteration" in caplog.text
    )
    for named in ((run, 100), (run / "iter_0000100", None)):
        with refused(CheckpointError, "iteration 100", "iteration 20"):
            load(*named)


def test_a_superseded_folder_of_another_iteration_is_refused(run: Path) -> None:
    (run / "iter_0000020").rename(run / "iter_0000100.superseded-1")
    with refused(CheckpointError, "iteration 100"):
        load(run / "iter_0000100.superseded-1")


# The weights of these checkpoints are in two files, so that transformers would prefer the one.
@pytest.mark.parametrize("name", ["model.safetensors", "adapter_config.json"])
def test_a_file_transformers_prefers_is_named_by_every_command(
    run: Path, name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    stray = run / "iter_0000020" / name
    save_file({"a": nn.Linear(1, 1).weight.detach()}, stray)
    assert script.main(["verify", str(run)]) == script.BAD
    assert str(stray) in capsys.readouterr().out
    assert script.main(["verify", str(run / "iter_0000010")]) == script.FINE
    capsys.readouterr()
    assert script.main(["ls", str(run)]) == script.FINE
    assert f"{name} does not belong to it" in capsys.readouterr().out
    caplog.set_level(logging.WARNING)
    assert load(run)[0] == 20
    assert f"{stray} is not part of the checkpoint, but transformers would read it" in caplog.text


def test_a_checkpoint_with_weights_in_one_file_does_not_mislead(tmp_path: Path) -> None:
    checkpointer = Checkpointer(SavePolicy(tmp_path), single_rank_channel(), nonce="n")
    checkpointer.start()
    checkpointer.save(5, contents(5))
    checkpointer.close()
    path = tmp_path / "iter_0000005"
    assert (path / "model.safetensors").exists()
    assert misleading_files(open_checkpoint(path, Files())) == []


@pytest.mark.slow
def test_transformers_prefers_what_is_called_misleading(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=300, n_positions=8))
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")

    def read() -> torch.Tensor:
        return GPT2LMHeadModel.from_pretrained(tmp_path).transformer.wte.weight

    assert torch.equal(read(), model.transformer.wte.weight)
    other = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(other, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert not read().any()
