"""The tokenizer beside a checkpoint: transformers makes the run's tokens with it, and the run's texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, pipeline

from tests.bpe import train_bpe
from tests.harness import TINY, run_ok
from trainer.commands import checkpoint as look
from trainer.commands import generate
from trainer.data.text import END_OF_TEXT_NAMES, open_encoder, prompt_tokens

pytestmark = pytest.mark.slow

TEXT = "it is so, and so it is; naïve größe, 東京 and so on\n" * 60
PROMPT = "it is so"
NAMES = ("tokenizer.json", "tokenizer_config.json")


def bpe(folder: Path, *, adds_begin: bool) -> Path:
    """Write a tokenizer of 300 tokens, which may begin every text with a token as LLaMA-3's does."""
    path = folder / "bpe.json"
    table = json.loads(train_bpe([TEXT], 300))
    if adds_begin:
        end = END_OF_TEXT_NAMES[0]
        single = [{"SpecialToken": {"id": end, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        tokens = {end: {"id": end, "ids": [0], "tokens": [end]}}
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        table["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": pair}
        table["post_processor"]["special_tokens"] = tokens
    path.write_text(json.dumps(table, ensure_ascii=False))
    return path


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_pipeline_over_a_checkpoint_says_what_generate_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, kind: str
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    overrides = [*TINY, f"model={family}_tiny", "data=text", f"data.path={tmp_path}/text.txt", "optimizer.lr=0.01"]
    overrides += [f"data.cache={tmp_path}/cache", "train.train_iters=4"]
    if kind == "bpe":
        tokenizer = bpe(tmp_path, adds_begin=family == "llama3")
        overrides += [f"data.tokenizer={tokenizer}", "model.vocab_size=300"]
        overrides += ["model.eos_token_id=0", "model.bos_token_id=0"]
    run_ok(tmp_path / "run", overrides)
    folder = tmp_path / "run/checkpoints/iter_0000004"

    assert generate.main([str(folder), "--prompt", PROMPT, "--max-new-tokens", "12"]) == 0
    ours = capsys.readouterr().out.removesuffix("\n")
    writer = pipeline("text-generation", model=str(folder))
    (found,) = writer(PROMPT, max_new_tokens=12, do_sample=False, skip_special_tokens=False)
    assert found["generated_text"] == ours
    assert len(ours) > len(PROMPT)

    encoder, theirs = open_encoder(None if kind == "bytes" else tokenizer), AutoTokenizer.from_pretrained(folder)
    end = encoder.end_of_text
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.model_max_length) == (end, end, 32)
    for text in (TEXT[:200], "\x00\ufffd é \U0001f600 \u3000x"):
        tokens = prompt_tokens(encoder, text, encoder.vocab_size)
        assert theirs(text).input_ids == tokens
        assert theirs(theirs.decode([*tokens, end])).input_ids == [*tokens, end]

    ordinary = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    assert ordinary("a<|endoftext|>").input_ids == prompt_tokens(encoder, "a<|endoftext|>", encoder.vocab_size)

    assert look.main(["verify", str(folder)]) == 0
    (folder / NAMES[0]).write_bytes((folder / NAMES[0]).read_bytes()[:-1] + b" ")
    assert look.main(["verify", str(folder)]) == 1
