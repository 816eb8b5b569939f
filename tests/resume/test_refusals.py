"""A checkpoint of another run is refused in one message, with nothing changed on disk; a flag lets it through.

`tests/unit/record/test_resume_rules.py` has the rule of every member; here are the commands.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import reprise
from reprise.errors import MismatchError, TrainerError
from reprise.format import MANIFEST, STATE, Journal, manifest
from reprise.format.manifest import FileEntry, digest_of
from tests.harness import ALL_CORES, TINY, all_files, checkpoint, curve, launch, run_ok
from tests.messages import refused
from tests.resume.starts import REFERENCE, start
from trainer.data.token_file import write_token_file

# Another value, what the message shows of it, and the flag that lets it through; without one the model is another.
CHANGES = [
    ("model.n_embd", "40", "20", None),
    ("model.activation", "gelu", "nothing", None),
    ("train.seq_length", "8", "16", "override_batch_size"),
    ("train.seed", "7", "1234", "override_data"),
    ("optimizer.lr", "0.002", "0.001", "override_scheduler"),
    ("train.micro_batch_size", "4", "2", "reshard"),
    ("model.dropout", "0.1", "0.0", "override_dropout"),
    ("train.dtype", "bfloat16", "float32", "override_dtype"),
    ("optimizer.moments_dtype", "bfloat16", "float32", "override_dtype"),
    ("parallel.zero_stage", "3", "1", "reshard"),
]


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def refuse(run: Path, *overrides: str, names: tuple[str, ...] = (), error: type[TrainerError] = MismatchError) -> str:
    """Check that a command is refused and changes nothing; return the message."""
    before = all_files(run)
    with refused(error, *names) as caught:
        start(run, *REFERENCE, *overrides)
    assert all_files(run) == before
    return str(caught.value)


def shows(message: str, field: str, saved: str, current: str) -> bool:
    line = rf"^  {re.escape(field)} +saved {saved}  current {current}(  |\.?$)"
    return re.search(line, message, re.MULTILINE) is not None


@pytest.mark.parametrize(("key", "current", "saved", "flag"), CHANGES, ids=[row[0] for row in CHANGES])
def test_a_difference_is_refused_unless_its_flag_is_set(
    run: Path, caplog: pytest.LogCaptureFixture, key: str, current: str, saved: str, flag: str | None
) -> None:
    override = f"{key}={current.lower()}"
    remedy = f"{checkpoint(run, 8)}" if flag is None else f"checkpoint.{flag}=true"
    message = refuse(run, override, names=(remedy,))
    assert shows(message, key, saved, current)
    assert ("load=none" in message) == (flag is None)
    if flag is not None:
        assert start(run, *REFERENCE, override, remedy).state.progress.consumed_tokens == 8 * 12 * 16
        assert f"{key}: saved {saved}, now {current}" in caplog.text


def test_other_data_are_refused_without_the_flag(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(random.Random(0).randbytes(20_000).hex().encode())
    data = ["data=text", f"data.path={text}", f"data.cache={tmp_path / 'cache'}"]
    print_of = json.loads((checkpoint(run, 8) / STATE).read_text())["data"]["fingerprint"]
    message = refuse(run, *data, names=("checkpoint.override_data=true",))
    assert shows(message, "data.path", rf"stdlib \({print_of}\)", rf"{text} \(\S+\)")
    assert start(run, *REFERENCE, *data, "checkpoint.override_data=true").state.progress.iteration == 8


def test_another_number_of_ranks_is_refused_on_every_rank(run: Path) -> None:
    before = all_files(run)
    ended = launch(run, REFERENCE, ranks=2)
    assert ended.statuses == (1, 1), ended.text
    assert all_files(run) == before
    assert "Traceback" not in ended.text
    assert shows(ended.outputs[0], "topology.world_size", "1", "2")
    assert "checkpoint.reshard=true" in ended.outputs[0]
    more = ["train.train_iters=9", "checkpoint.reshard=true"]
    assert "iteration 8 from" in run_ok(run, [*REFERENCE, *more], ranks=2).outputs[0]
    assert [row[0] for row in curve(run)] == list(range(1, 10))


def test_several_differences_are_one_message(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    message = refuse(run, "model.n_layer=3", "optimizer.lr=0.002", "train.seed=7")
    for key, saved, current in (("model.n_layer", 2, 3), ("train.seed", 1234, 7), ("optimizer.lr", 0.001, 0.002)):
        assert shows(message, key, str(saved), str(current))
    several = ["optimizer.lr=0.002", "train.seed=7"]
    fixable = refuse(run, *several)
    assert "set checkpoint.allow=data,lr." in fixable
    assert "set checkpoint.allow=data,dtype,lr." in refuse(run, *several, "train.dtype=bfloat16", "checkpoint.allow=lr")
    for listed in ("data,lr", "all"):
        caplog.clear()
        assert start(run, *REFERENCE, *several, f"checkpoint.allow={listed}").state.progress.iteration == 8
        lines = [line for line in caplog.messages if ", now " in line]
        assert len(lines) == 2
        assert all(key in caplog.text for key in ("optimizer.lr: saved", "train.seed: saved"))
    refuse(run, "model.n_layer=3", "checkpoint.allow=all")


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["train.activation_checkpointing=true"], ["train.activation_checkpointing: saved False, now True"]),
        (["train.eval_interval=2"], ["train.eval_interval: saved 4, now 2; checkpoint.keep_best"]),
        ([], []),
    ],
)
def test_what_needs_no_flag_is_said_in_a_line(
    run: Path, caplog: pytest.LogCaptureFixture, overrides: list[str], lines: list[str]
) -> None:
    start(run, *REFERENCE, *overrides)
    assert [line for line in caplog.messages if ", now " in line and not line.startswith(tuple(lines))] == []
    assert all(line in caplog.text for line in lines)


def test_another_thread_count_is_said_in_a_line(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(run, *REFERENCE, threads=2)
    assert "train.threads: saved 1, now 2; weights and moments stay bitwise" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(len(ALL_CORES) < 2, reason="needs two cores")
def test_fixed_threads_have_their_bits_on_one_core(tmp_path: Path) -> None:
    fixed = [*REFERENCE, "train.threads=2", "train.train_iters=3"]
    run_ok(tmp_path / "run", fixed)
    assert json.loads((checkpoint(tmp_path / "run", 3) / STATE).read_text())["environment"]["threads"] == 2
    run_ok(tmp_path / "unbroken", fixed, cores=ALL_CORES)
    assert curve(tmp_path / "unbroken") == curve(tmp_path / "run")


@pytest.mark.slow
def test_other_validation_data_are_said_in_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, seed in (("train", 0), ("valid", 1), ("other", 2)):
        tokens = np.random.default_rng(seed).integers(0, 256, 4000)
        write_token_file(tmp_path / f"{name}.bin", [tokens], dtype=np.uint16)
    evaluated = ["model=gpt2_tiny", *TINY, "data=token_file", f"data.train={tmp_path}/train.bin"]
    evaluated += ["train.train_iters=3", "train.eval_interval=3"]
    run_ok(tmp_path / "run", [*evaluated, f"data.valid={tmp_path}/valid.bin", "train.eval_iters=2"])
    start(tmp_path / "run", *evaluated, f"data.valid={tmp_path}/other.bin", "train.eval_iters=1")
    valid = re.compile(r"data\.valid: saved \w{16}, now \w{16}; checkpoint\.keep_best")
    assert any(map(valid.match, caplog.messages))
    assert "train.eval_iters: saved 2, now 1; " in caplog.text
    assert not any(line.startswith(("data.train: ", "data.path: ", "data.kind: ")) for line in caplog.messages)


def test_a_checkpoint_without_optional_members_loads_silently(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoint(run, 8)
    state = json.loads((folder / STATE).read_text())
    del state["clip_grad"], state["evaluation"]
    data = json.dumps(state).encode()
    (folder / STATE).write_bytes(data)
    document = manifest.from_bytes((folder / MANIFEST).read_bytes(), where=folder)
    files = {**document.files, STATE: FileEntry(len(data), digest_of(data), is_tensor_file=False)}
    (folder / MANIFEST).write_bytes(manifest.to_bytes(replace(document, files=files)))
    assert start(run, *REFERENCE, "train.clip_grad=0.5", "train.eval_interval=3").state.progress.iteration == 8
    assert ", now " not in caplog.text


def test_a_lost_checkpoint_is_said_in_a_line(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "checkpoints/latest_checkpointed_iteration.txt").write_text("9\n")
    text = run_ok(run, [*REFERENCE, "train.train_iters=9"]).text
    assert "names iteration 9, but the newest checkpoint is iter_0000008" in text


def test_saves_recorded_by_an_earlier_version_are_not_lost(run: Path) -> None:
    """Its `run.json` names no save."""
    for number in (2, 4, 6, 8):
        shutil.rmtree(checkpoint(run, number))
    path = run / "run.json"
    path.write_bytes(Journal(Journal.from_bytes(path.read_bytes(), where=path).lineage).to_bytes())
    refuse(run, names=("iteration 8",), error=TrainerError)
    assert start(run, *REFERENCE, "checkpoint.load=none").state.progress.iteration == 0


def test_a_checkpoint_without_its_moments_is_refused(run: Path) -> None:
    reprise.drop_optimizer(run, before=6)
    message = refuse(run, "checkpoint.ckpt_step=4", names=("checkpoint.ckpt_step",), error=TrainerError)
    assert "`reprise checkpoint prune --optimizer`" in message
