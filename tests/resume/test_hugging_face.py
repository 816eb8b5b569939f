"""A training checkpoint as it lies is a model folder of transformers."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from models.build import build_model
from models.families import aliases, stored_tensors
from models.network import Model
from tests.harness import TINY, compose, run_ok
from trainer.data.section import DataSection
from trainer.data.tokenizer_files import tokenizer_files

# family, ranks, ZeRO stage and what else makes the layout of the files another one
CASES = {
    "gpt2": (["model=gpt2_tiny", "model.dropout=0.1"], 1, 1),
    "gpt2-untied-padded-many-files": (
        [
            *("model=gpt2_tiny", "model.tie_word_embeddings=false"),
            *("model.pad_vocab_multiple=64", "checkpoint.file_bytes=8192"),
        ],
        2,
        3,
    ),
    "llama3": (["model=llama3_tiny", "model.n_kv_head=1"], 2, 3),
    "llama3-tied": (["model=llama3_tiny", "model.tie_word_embeddings=true", "checkpoint.no_save_optim=true"], 1, 1),
    "qwen3": (["model=qwen3_tiny", "model.n_kv_head=1"], 2, 3),
}


class _Lines(logging.Handler):
    """Keeps what a logger says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def our_model(folder: Path, overrides: list[str]) -> Model:
    """Build our model from nothing but the stored tensors."""
    model = build_model(compose(overrides).model).eval()
    values = {name: value for path in folder.glob("model*.safetensors") for name, value in load_file(path).items()}
    stored, names = stored_tensors(model.config), aliases(model.config)
    assert values.keys() == stored.keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            view = stored[names.get(name, name)].view
            parameter.zero_()
            parameter[tuple(slice(size) for size in view)] = values[names.get(name, name)].view(view)
    return model


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if "files" in c else pytest.mark.slow) for c in CASES])
def test_transformers_opens_a_training_checkpoint_as_it_lies(tmp_path: Path, case: str) -> None:
    family, ranks, zero_stage = CASES[case]
    overrides = [*TINY, *family, "train.train_iters=3", f"parallel.zero_stage={zero_stage}"]
    run_ok(tmp_path / "run", overrides, ranks=ranks)
    folder = tmp_path / "run/checkpoints/iter_0000003"

    # Rank 0 writes them, the same bytes on any topology.
    expected = tokenizer_files(DataSection(), rows=257, bos=256, eos=256, positions=32)
    assert {name: (folder / name).read_bytes() for name in expected} == expected

    handler = _Lines()
    logger = transformers_logging.get_logger("transformers")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    finally:
        logger.removeHandler(handler)
    assert handler.lines == []
    assert not any(report.values()), report
    assert all(parameter.dtype == torch.float32 for parameter in theirs.parameters())

    tokens = torch.randint(257, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = theirs.eval()(tokens).logits
        found = our_model(folder, overrides)(tokens)[..., :257]  # what is beyond is padding
    # float32 sums in another order, on logits of about 1.
    assert (found - logits).abs().max() <= 1e-5
    assert logits.abs().max() > 0.05

    text = theirs.generate(tokens[:1, :4], max_new_tokens=5, do_sample=False)
    assert 5 <= text.shape[1] <= 9
    assert theirs.generation_config.eos_token_id == 256
