"""Checkpoints of Megatron-LM's format `torch` are imported bit for bit, however the run was laid out over its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import TINY, compose, run_ok, tensor_files
from tests.interop.megatron_layout import Way, write, write_deepspeed
from trainer.checkpoint.loading.reader import open_checkpoint
from trainer.checkpoint.storage.files import Files
from trainer.interop.deepspeed import source as deepspeed
from trainer.interop.formats import ImportOptions
from trainer.interop.megatron.source import read_source
from trainer.interop.output import write_checkpoint
from trainer.interop.source import StateSource, of_checkpoint

SAVED = 3
SIZES = ["model.n_layer=4", "model.n_head=4", "model.n_embd=24", "model.bos_token_id=256", "model.eos_token_id=256"]
RUN = [*TINY, *SIZES, f"train.train_iters={SAVED}", "optimizer.lr=1e-2", f"checkpoint.save_interval={SAVED}"]
MODELS = {
    "gpt2": ["model=gpt2_tiny"],
    "llama3": ["model=llama3_tiny", "model.n_kv_head=2", "model.tie_word_embeddings=false"],
}
BF16 = torch.bfloat16


@pytest.fixture(scope="module", params=MODELS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """A checkpoint of a run of ours, and its overrides."""
    overrides = [*MODELS[request.param], *RUN]
    folder = tmp_path_factory.mktemp("trained") / request.param
    run_ok(folder, overrides)
    return overrides, folder / f"checkpoints/iter_{SAVED:07d}"


def opened(path: Path, overrides: list[str], **options: Any) -> StateSource:
    """Open a checkpoint whose pickles are trusted."""
    return read_source(path, ImportOptions(compose(overrides), trusts_pickle=True, overrides=overrides, **options))


def source_of(path: Path) -> StateSource:
    return of_checkpoint(open_checkpoint(path, Files()))


WAYS = {
    "one rank": Way(),
    "tp2 pp2 dp2, in buckets": Way(tp=2, pp=2, dp=2, bucket=3000),
    "tp2 pp2 vpp2 dp3": Way(tp=2, pp=2, vpp=2, dp=3, bucket=2000, rows=264),
    "tp2 pp2 plain": Way(tp=2, pp=2, is_distributed=False, names="te"),
    "pp2 vpp2 plain bf16": Way(pp=2, vpp=2, is_distributed=False, dtype=BF16),
    "tp2 dp3 bf16": Way(tp=2, dp=3, dtype=BF16, bucket=3000, names="te", rows=272),
    "pp4 legacy": Way(pp=4, dp=2, names="newer", bucket=4000),
    "tp2 pp2 legacy plain bf16": Way(tp=2, pp=2, names="newer", is_distributed=False, dtype=BF16),
    "tp2 legacy, lists of buckets": Way(tp=2, dp=2, names="newer", form="list", bucket=3000),
    "pp2 legacy, nothing aligned": Way(pp=2, dp=3, names="newer", form="older", alignment=1, bucket=3000),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_layout_gives_the_bytes_it_was_made_from(
    trained: tuple[list[str], Path], tmp_path: Path, way: str
) -> None:
    overrides, saved = trained
    path = write(tmp_path / "megatron", source_of(saved), WAYS[way])
    source = opened(path, overrides)
    made = write_checkpoint(source, tmp_path / "run", compose(overrides))
    assert tensor_files(made) == tensor_files(saved)


GPT2_ALONE = {
    "tp4": Way(tp=4, dp=2, rows=260),
    "version 0": Way(tp=2, pp=2, names="older", version=0, is_distributed=False),
    "version 1 in bf16": Way(tp=2, names="older", version=1, is_distributed=False, dtype=BF16),
    "version 2 distributed": Way(tp=2, pp=2, names="older", version=2, form="older", alignment=1),
}


@pytest.mark.parametrize("way", GPT2_ALONE)
@pytest.mark.parametrize("trained", ["gpt2"], indirect=True)
def test_older_versions_of_gpt2_give_the_same_bytes(trained: tuple[list[str], Path], tmp_path: Path, way: str) -> None:
    overrides, saved = trained
    source = opened(write(tmp_path / "megatron", source_of(saved), GPT2_ALONE[way]), overrides)
    assert tensor_files(write_checkpoint(source, tmp_path / "run", compose(overrides))) == tensor_files(saved)


DEEPSPEED = {
    "tp2 pp2 dp2": (Way(tp=2, pp=2, dp=2, names="mds"), True),
    "pp4 dp3 bf16": (Way(pp=4, dp=3, names="mds", dtype=BF16), True),
    "tp2 dp3 bf16, aligned": (Way(tp=2, dp=3, names="mds", dtype=BF16, rows=272), True),
    "tp2 dp2, no pipeline": (Way(tp=2, dp=2, names="mds"), False),
}


@pytest.mark.parametrize("way", DEEPSPEED)
def test_megatron_deepspeed_gives_the_bytes_it_was_made_from(
    trained: tuple[list[str], Path], tmp_path: Path, way: str
) -> None:
    overrides, saved = trained
    laid_out, is_pipe = DEEPSPEED[way]
    path = write_deepspeed(tmp_path / "ds", source_of(saved), laid_out, is_pipe=is_pipe)
    made = write_checkpoint(opened_deepspeed(path.parent, overrides), tmp_path / "run", compose(overrides))
    assert tensor_files(made) == tensor_files(saved)


def opened_deepspeed(path: Path, overrides: list[str], **options: Any) -> StateSource:
    asked = ImportOptions(compose(overrides), trusts_pickle=True, overrides=overrides, **options)
    return deepspeed.read_source(path, asked)
