"""`reprise evaluate` finds the losses that a run logged, bit by bit, at other topologies and from a store too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from reprise.storage import Json
from tests.harness import TINY, call_on_ranks, checkpoint, run_ok, state_of
from tests.messages import says
from tests.resume.differential import rows_of
from tests.resume.random_tokens import write_random_tokens
from trainer.commands import checkpoint as checkpoints
from trainer.commands import evaluate, follow

BASE = (
    "model=llama3_tiny",
    *TINY,
    "model.n_kv_head=2",
    "train.threads=1",
    "train.train_iters=4",
    "train.global_batch_size=8",
    "train.eval_interval=2",
    "train.eval_iters=3",
    "train.ema_decay=0.9",
    "checkpoint.save_interval=2",
    "data=token_file",
)


def losses(run: Path, name: str = "valid_loss") -> dict[int, str]:
    """Return the bits of the losses that a run logged, by iteration."""
    return {row["iteration"]: row[f"{name}_hex"] for row in rows_of(run) if row.get("event") == "evaluation"}


def evaluated(folder: Path, *words: str, ranks: int = 1) -> list[Json]:
    """Return the lines of a command on some ranks, of which the first prints."""
    ended = call_on_ranks(_evaluate, words, folder=folder / "evaluation", ranks=ranks)
    assert ended.ok, ended.text
    lines = [[json.loads(line) for line in output.splitlines() if line[0] == "{"] for output in ended.outputs]
    assert not any(lines[1:])
    return lines[0]


def _evaluate(arguments: list[str]) -> None:
    raise SystemExit(evaluate.main(arguments))


def refuses(words: Sequence[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert evaluate.main(words) == 2, words
    text = capsys.readouterr().err
    assert key in text, text
    says(text)


def tokens_of(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    write_random_tokens(folder)
    return [f"data.train={folder / 'a.bin'}", f"data.valid={folder / 'b.bin'}"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on two ranks whose training data is gone."""
    folder = tmp_path_factory.mktemp("trained")
    run = folder / "run"
    axes = ["parallel.invariant_ranks=2", "parallel=zero3", "parallel.invariant_tensor_ranks=2"]
    run_ok(run, [*BASE, *tokens_of(folder), "model.pad_vocab_multiple=2", *axes], ranks=2)
    (folder / "a.bin").unlink()
    return run


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (1, []),
        (2, ["parallel.tensor_model_parallel_size=2"]),
        pytest.param(2, [], marks=pytest.mark.slow),
        pytest.param(4, ["parallel.pipeline_model_parallel_size=2"], marks=pytest.mark.slow),
    ],
)
def test_each_topology_has_the_losses_logged(trained: Path, tmp_path: Path, ranks: int, axes: Sequence[str]) -> None:
    folders = [str(checkpoint(trained, number)) for number in (2, 4)]
    for name, words in {"valid_loss": [], "ema_loss": ["--ema"]}.items():
        lines = evaluated(tmp_path, *folders, *words, *(["--set", *axes] if axes else []), ranks=ranks)
        assert {line["iteration"]: line[f"{name}_hex"] for line in lines} == losses(trained, name)
        assert [line["checkpoint"] for line in lines] == folders
        assert {line["samples"] for line in lines} == {24}


def test_a_run_in_a_store_is_evaluated_at_its_newest(trained: Path, tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    assert checkpoints.main(["copy", str(trained), store]) == 0
    for name, words in {"valid_loss": [], "ema_loss": ["--ema"]}.items():
        (line,) = evaluated(tmp_path, store, *words)
        assert (line[f"{name}_hex"], line["iteration"]) == (losses(trained, name)[4], 4)


def test_a_pipelined_run_moves_to_a_rank_on_other_data(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ok(run, [*BASE, *tokens_of(tmp_path), "parallel=pp2"], ranks=2)
    assert evaluated(tmp_path, str(run))[0]["valid_loss_hex"] == losses(run)[4]
    other = tmp_path / "other"
    run_ok(other, [*BASE, *tokens_of(tmp_path), f"data.valid={tmp_path / 'c.bin'}", "parallel=pp2"], ranks=2)
    (line,) = evaluated(tmp_path, str(run), "--data", str(tmp_path / "c.bin"))
    assert line["valid_loss_hex"] == losses(other)[4] != losses(run)[4]
    assert line["data"] == state_of(checkpoint(other, 4))["data"]["valid_fingerprint"]


def test_adapters_are_evaluated_on_their_base_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tokens_of(tmp_path)
    for seed in (1, 2):
        run_ok(tmp_path / f"base{seed}", [*BASE, *data, f"train.seed={seed}"])
    bases = [checkpoint(tmp_path / f"base{seed}", 2) for seed in (1, 2)]
    lora = ["model.lora.rank=4", "train.ema_decay=0", "optimizer.lr=0.01"]
    run_ok(tmp_path / "run", [*BASE, *data, *lora, f"checkpoint.base={bases[0]}"])
    words = [str(tmp_path / "run"), "--set"]
    assert (
        evaluated(tmp_path, *words, f"checkpoint.base={bases[0]}")[0]["valid_loss_hex"] == losses(tmp_path / "run")[4]
    )
    refuses([*words, f"checkpoint.base={bases[1]}"], "base", capsys)
    refuses(words[:1], "checkpoint.base", capsys)


def test_a_follower_evaluates_unless_it_has_a_command(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    shutil.rmtree(checkpoint(run, 2))
    assert follow.main([str(run), "--once"]) == 0
    (line,) = [json.loads(line) for line in (run / "follow.jsonl").read_text().splitlines()]
    assert (line["metric"], float(line["value"]).hex()) == ("valid_loss", losses(run)[4])


def test_what_cannot_be_evaluated_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run_ok(run, [*BASE, *tokens_of(tmp_path), "data.valid=null", "train.eval_interval=0", "train.ema_decay=0"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.bin").write_text("no tokens")
    data = ["--data", str(tmp_path / "c.bin")]
    for words, key in {
        (str(tmp_path / "none"),): str(tmp_path / "none"),
        (str(tmp_path / "empty"),): "run_config.json",
        (str(run),): "--data",
        (str(run), *data, "--ema"): "--ema",
        (str(run), *data, "--set", "train.eval_itres=2"): "train.eval_iters",
        (str(run), *data, "--set", "parallel.tensor_model_parallel_size=3"): "parallel.tensor_model_parallel_size",
        (str(run), "--data", str(tmp_path / "text.bin")): "text.bin",
    }.items():
        refuses(words, key, capsys)
