"""A checkpoint of another run is refused in one message, with nothing changed on disk; a flag lets it through."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import reprise
from reprise.folder import MANIFEST, STATE
from reprise.format import manifest
from reprise.format.manifest import FileEntry, digest_of
from tests.harness import ALL_CORES, TINY, Ended, all_files, curve, launch, run_ok
from trainer.data.token_file import write_token_file

BASE = ["model=gpt2_tiny", *TINY, "train.train_iters=3", "schedule.lr_decay_iters=20"]

REFUSED = [
    ("model.n_layer", "model.n_layer=3", "2", "3"),
    ("model.n_embd", "model.n_embd=40", "20", "40"),
    ("model.vocab_size", "model.vocab_size=300", "257", "300"),
    ("model.tie_word_embeddings", "model.tie_word_embeddings=false", "True", "False"),
    ("model.activation", "model.activation=gelu", "nothing", "gelu"),
]
WITH_FLAG = [
    ("train.global_batch_size", "train.global_batch_size=24", "12", "24", "override_batch_size"),
    ("train.seq_length", "train.seq_length=8", "16", "8", "override_batch_size"),
    ("train.seed", "train.seed=7", "1234", "7", "override_data"),
    ("optimizer.lr", "optimizer.lr=0.002", "0.001", "0.002", "override_scheduler"),
    ("schedule.min_lr", "schedule.min_lr=0.0002", "0.0001", "0.0002", "override_scheduler"),
    ("schedule.lr_decay_style", "schedule.lr_decay_style=linear", "cosine", "linear", "override_scheduler"),
    ("schedule.lr_warmup_iters", "schedule.lr_warmup_iters=2", "3", "2", "override_scheduler"),
    ("schedule.lr_decay_iters", "schedule.lr_decay_iters=30", "20", "30", "override_scheduler"),
    ("optimizer.weight_decay", "optimizer.weight_decay=0.2", "0.1", "0.2", "override_scheduler"),
    ("optimizer.adam_beta2", "optimizer.adam_beta2=0.99", "0.95", "0.99", "override_scheduler"),
    ("optimizer.adam_eps", "optimizer.adam_eps=1e-06", "1e-08", "1e-06", "override_scheduler"),
    ("train.clip_grad", "train.clip_grad=0.5", "1.0", "0.5", "override_scheduler"),
    ("train.micro_batch_size", "train.micro_batch_size=4", "2", "4", "reshard"),
    ("model.dropout", "model.dropout=0.1", "0.0", "0.1", "override_dropout"),
    ("train.dtype", "train.dtype=bfloat16", "float32", "bfloat16", "override_dtype"),
    ("parallel.zero_stage", "parallel.zero_stage=3", "1", "3", "reshard"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of three iterations on one rank."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    run_ok(folder, BASE)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of that run that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def refuse(run: Path, *overrides: str, ranks: int = 1) -> str:
    """Check that the command is refused on every rank and changes nothing; return what rank 0 said."""
    before = all_files(run)
    assert before["checkpoints/lock"] == b""
    ended = launch(run, [*BASE, *overrides], ranks=ranks)
    assert ended.statuses == (1,) * ranks, ended.text
    assert all_files(run) == before
    assert "Traceback" not in ended.text
    return ended.outputs[0]


def continue_(run: Path, *overrides: str, ranks: int = 1) -> Ended:
    """Check that the command goes on by one iteration from the third."""
    ended = run_ok(run, [*BASE, "train.train_iters=4", *overrides], ranks=ranks)
    assert "iteration 3 from" in ended.outputs[0]
    assert [row[0] for row in curve(run)] == [1, 2, 3, 4]
    return ended


def shows(message: str, field: str, saved: str, current: str) -> bool:
    return (
        re.search(rf"^  {re.escape(field)} +saved {saved}  current {current}(  |\.?$)", message, re.MULTILINE)
        is not None
    )


@pytest.mark.parametrize(("field", "override", "saved_value", "current"), REFUSED, ids=[row[0] for row in REFUSED])
def test_another_model_is_refused(run: Path, field: str, override: str, saved_value: str, current: str) -> None:
    message = refuse(run, override)
    assert shows(message, field, saved_value, current)
    assert "load=none" in message
    assert f"{run}/checkpoints/iter_0000003" in message


def test_a_record_without_an_activation_has_the_default(run: Path) -> None:
    assert "saved nothing  current gelu  (absent means gelu_tanh)" in refuse(run, "model.activation=gelu")
    state = json.loads((run / "checkpoints/iter_0000003/trainer_state.json").read_text())
    assert "activation" not in state["model"]
    continue_(run, "model.activation=gelu_tanh")


def test_another_family_is_refused(run: Path) -> None:
    assert shows(refuse(run, "model=llama3_tiny"), "model.family", "gpt2", "llama3")


@pytest.mark.parametrize(
    ("field", "override", "saved_value", "current", "flag"), WITH_FLAG, ids=[row[0] for row in WITH_FLAG]
)
def test_a_difference_is_refused_unless_its_flag_is_set(
    run: Path, field: str, override: str, saved_value: str, current: str, flag: str
) -> None:
    message = refuse(run, override)
    assert shows(message, field, saved_value, current)
    assert f"checkpoint.{flag}=true" in message
    assert "load=none" not in message
    ended = continue_(run, override, f"checkpoint.{flag}=true")
    assert f"{field}: saved {saved_value}, now {current}" in ended.outputs[0]


def test_other_data_are_refused_without_the_flag(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(random.Random(0).randbytes(20_000).hex().encode())
    data = ["data=text", f"data.path={text}", f"data.cache={tmp_path / 'cache'}"]
    state = json.loads((run / "checkpoints/iter_0000003/trainer_state.json").read_text())
    message = refuse(run, *data)
    assert shows(message, "data.path", rf"stdlib \({state['data']['fingerprint']}\)", rf"{text} \(\S+\)")
    assert "checkpoint.override_data=true" in message
    continue_(run, *data, "checkpoint.override_data=true")


def test_another_number_of_ranks_is_refused_on_every_rank(run: Path) -> None:
    message = refuse(run, ranks=2)
    assert shows(message, "topology.world_size", "1", "2")
    assert shows(message, "topology.dp", "1", "2")
    assert "checkpoint.reshard=true" in message
    continue_(run, "checkpoint.reshard=true", ranks=2)


def test_another_topology_says_whether_the_bits_stay(run: Path, tmp_path: Path) -> None:
    assert "(within rounding; checkpoint.reshard=true allows it)" in refuse(run, ranks=2)
    lanes = "parallel.invariant_ranks=2"
    on = tmp_path / "on"
    run_ok(on, [*BASE, lanes])
    assert json.loads((on / "checkpoints/iter_0000003" / STATE).read_text())["topology"]["invariant_ranks"] == 2
    assert "(same bits; checkpoint.reshard=true allows it)" in refuse(on, lanes, "parallel.zero_stage=3", ranks=2)
    unbroken = tmp_path / "unbroken"
    shutil.copytree(on, unbroken)
    moved = [lanes, "checkpoint.reshard=true", "parallel.zero_stage=3"]
    ended = continue_(on, *moved, ranks=2)
    for name, saved, now in (("topology.dp", 1, 2), ("topology.world_size", 1, 2), ("parallel.zero_stage", 1, 3)):
        line = f"{name}: saved {saved}, now {now}; weights and moments stay bitwise, and so does the loss curve"
        assert f"{line}: same bits" in ended.outputs[0].splitlines()
    continue_(unbroken, lanes)
    assert curve(unbroken) == curve(on)


def test_other_invariant_ranks_are_said_in_a_line(run: Path) -> None:
    """The checkpoint of a run without the key has no such member."""
    assert "invariant_ranks" not in json.loads((run / "checkpoints/iter_0000003" / STATE).read_text())["topology"]
    ended = continue_(run, "parallel.invariant_ranks=2", "checkpoint.reshard=true", ranks=2)
    rounding = "weights and moments stay bitwise, the loss curve equals within rounding"
    assert f"topology.dp: saved 1, now 2; {rounding}" in ended.outputs[0].splitlines()
    line = f"parallel.invariant_ranks: saved 0, now 2; {rounding}: gradients are added in another order"
    assert line in ended.outputs[0].splitlines()


def test_several_differences_are_one_message(run: Path) -> None:
    message = refuse(run, "model.n_layer=3", "optimizer.lr=0.002", "train.seed=7", ranks=3)
    assert shows(message, "model.n_layer", "2", "3")
    assert shows(message, "topology.world_size", "1", "3")
    assert shows(message, "train.seed", "1234", "7")
    assert shows(message, "optimizer.lr", "0.001", "0.002")
    assert message.count("MismatchError") == 1
    flags = "checkpoint.override_data=true", "checkpoint.override_scheduler=true", "checkpoint.reshard=true"
    assert all(flag in message for flag in flags)

    fixable = refuse(run, "optimizer.lr=0.002", "train.seed=7")
    assert "set checkpoint.override_data=true checkpoint.override_scheduler=true." in fixable
    own = f"`reprise train run.dir={run} checkpoint.load={run} train.train_iters=N`."
    for text in (message, fixable):
        assert text.rstrip().endswith(f"\nTo continue with the run's own configuration: {own}")


def test_what_only_changes_the_rounding_is_said_in_a_line(run: Path) -> None:
    ended = run_ok(run, [*BASE, "train.compile=true", "train.activation_checkpointing=true"])
    for line in (
        "train.compile: saved False, now True; weights and moments stay bitwise",
        "train.activation_checkpointing: saved False, now True; weights and moments stay bitwise",
    ):
        assert line in ended.text


def test_another_evaluation_is_said_in_a_line(run: Path) -> None:
    ended = run_ok(run, [*BASE, "train.eval_interval=1", "train.eval_iters=1"])
    losses = "checkpoint.keep_best and the best loss compare validation losses that are not measured alike"
    assert f"train.eval_interval: saved 0, now 1; {losses}" in ended.text
    assert "eval_iters" not in ended.text  # nothing was evaluated before


def test_other_validation_data_are_said_in_a_line(tmp_path: Path) -> None:
    for name, seed in (("train", 0), ("valid", 1), ("other", 2)):
        tokens = np.random.default_rng(seed).integers(0, 256, 4000)
        write_token_file(tmp_path / f"{name}.bin", [tokens], dtype=np.uint16)
    evaluated = [*BASE, "data=token_file", f"data.train={tmp_path}/train.bin", "train.eval_interval=3"]
    first = [*evaluated, f"data.valid={tmp_path}/valid.bin", "train.eval_iters=2"]
    run = tmp_path / "run"
    run_ok(run, first)
    ended = run_ok(run, [*evaluated, f"data.valid={tmp_path}/other.bin", "train.eval_iters=1", "train.train_iters=4"])
    assert re.search(r"^data\.valid: saved \w{16}, now \w{16}; checkpoint\.keep_best", ended.text, re.M)
    assert "train.eval_iters: saved 2, now 1; " in ended.text
    assert not re.search(r"^data\.(train|path|kind): ", ended.text, re.M)


def test_a_checkpoint_without_optional_members_loads_silently(run: Path) -> None:
    checkpoint = run / "checkpoints/iter_0000003"
    state = json.loads((checkpoint / STATE).read_text())
    assert state["data"].keys() == {"fingerprint"}  # nothing is evaluated in this run
    assert {state.pop("clip_grad"), *state.pop("evaluation").values()} == {1.0, 0}
    replace_document(checkpoint, STATE, state)
    ended = run_ok(run, [*BASE, "train.clip_grad=0.5", "train.eval_interval=3"])
    assert "now" not in ended.text.split("loaded")[0]


def test_lost_records_and_lost_checkpoints_are_said_in_a_line(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "checkpoints/latest_checkpointed_iteration.txt").write_text("9\n")
    text = continue_from_lost(run)
    assert f"{run}/metrics.jsonl has no line of 3 iterations of this run, the first 1, the last 3" in text
    assert "names iteration 9, but the newest checkpoint is iter_0000003" in text


def test_a_tracker_without_any_checkpoint_is_no_fresh_start(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/iter_0000003")
    (run / "metrics.jsonl").unlink()
    message = refuse(run)
    assert "The tracker names a checkpoint, but there is none to continue from" in message
    assert "expected the folder iter_0000003" in message
    assert "starting fresh" in run_ok(run, [*BASE, "checkpoint.load=none"]).text


def replace_document(checkpoint: Path, name: str, document: dict[str, object]) -> None:
    """Replace a JSON file of a checkpoint, and its digest in the manifest."""
    data = json.dumps(document).encode()
    (checkpoint / name).write_bytes(data)
    found = manifest.from_bytes((checkpoint / MANIFEST).read_bytes(), where=checkpoint)
    files = {**found.files, name: FileEntry(len(data), digest_of(data), is_tensor_file=False)}
    (checkpoint / MANIFEST).write_bytes(manifest.to_bytes(replace(found, files=files)))


def continue_from_lost(run: Path) -> str:
    ended = run_ok(run, [*BASE, "train.train_iters=4"])
    assert [row[0] for row in curve(run)] == [4]
    return ended.outputs[0]


@pytest.mark.skipif(len(ALL_CORES) < 2, reason="needs two cores")
def test_another_thread_count_is_said_in_a_line(run: Path) -> None:
    ended = run_ok(run, BASE, cores=ALL_CORES)
    assert f"train.threads: saved 1, now {len(ALL_CORES)}; weights and moments stay bitwise" in ended.text


def test_fixed_threads_are_kept_or_said_in_a_line(tmp_path: Path) -> None:
    """Every rank has one core here, so that its share would be one thread."""
    fixed = "train.threads=2"
    run_ok(tmp_path / "run", [*BASE, fixed])
    state = json.loads((tmp_path / "run/checkpoints/iter_0000003" / STATE).read_text())
    assert state["environment"]["threads"] == 2
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    assert "environment.threads" not in continue_(tmp_path / "run", fixed).text
    assert (
        "train.threads: saved 2, now 1; weights and moments stay bitwise, the loss curve equals within rounding: "
        "sums of a matrix product on a CPU depend on the number of threads; "
        "train.threads=2 keeps the bits of these sums"
    ) in continue_(tmp_path / "other", "train.threads=1").outputs[0].splitlines()

    run_ok(tmp_path / "unbroken", [*BASE, fixed, "train.train_iters=4"], cores=ALL_CORES)
    assert curve(tmp_path / "unbroken") == curve(tmp_path / "run")


def test_an_unchanged_run_loads_without_a_word(run: Path) -> None:
    ended = run_ok(run, BASE)
    assert "now" not in ended.text.split("loaded")[0]
    assert re.search(r"loaded (\d+) of \1 tensors, \d+ bytes, .* GB/s: iteration 3 from ", ended.text)


def test_a_checkpoint_without_its_moments_is_refused(tmp_path: Path) -> None:
    overrides = [*BASE, "checkpoint.save_interval=1"]
    run_ok(tmp_path / "run", overrides)
    reprise.drop_optimizer(tmp_path / "run", before=3)
    before = all_files(tmp_path / "run" / "checkpoints")
    refused = launch(tmp_path / "run", [*overrides, "checkpoint.ckpt_step=2"])
    assert not refused.ok
    assert "no optimizer state: `reprise checkpoint prune --optimizer` dropped it" in refused.text
    assert "Resume from a checkpoint that has it, with checkpoint.ckpt_step." in refused.text
    assert all_files(tmp_path / "run" / "checkpoints") == before
