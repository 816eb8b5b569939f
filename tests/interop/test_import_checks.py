"""What an import refuses, what it does not ask for, and what it names as left behind."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from reprise.errors import CheckpointError, MismatchError, TrainerError
from reprise.loading import open_checkpoint
from reprise.storage import Files
from tests.harness import TINY, compose, run_ok
from tests.interop import states
from tests.interop.states import changed, random_state, save_dcp, weights_of, write_dcp
from tests.messages import refused
from trainer.commands import convert
from trainer.interop.finite import require_finite

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MODEL = ["model=gpt2_tiny", *TINY[:5]]
RUN = ["model=gpt2_tiny", *TINY, "train.train_iters=3", "checkpoint.finetune=true"]
STATE = random_state(compose(MODEL).model)
NAME = "transformer.h.1.attn.c_attn.weight"  # [20, 60], which the model holds as [20, 3, 20]


def with_nan(key: str = "") -> states.StateSource:
    """Return a state with three numbers of `NAME` not finite, the first of them infinite."""
    tensor = STATE.read(key + NAME).clone()
    tensor[13, 47], tensor[13, 48], tensor[19, 59] = -math.inf, math.nan, math.nan
    return changed(STATE, **{(key + NAME).replace(".", "__"): tensor})


def values() -> dict[str, torch.Tensor]:
    """Return random float32 tensors of the tiny GPT-2, by name."""
    return weights_of(STATE)


def write_hf(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    return states.write_hf(folder, states.StateSource(STATE.model, 0, has_optimizer=False, read=tensors.__getitem__))


def bring_in(kind: str, source: Path, folder: Path, *more: str) -> int:
    return convert.main(["import", kind, str(source), str(folder), "--trust-pickle", *more])


def begin(folder: Path, overrides: list[str]) -> None:
    """Begin a run of one process."""
    states.begun(*overrides, f"run.dir={folder}")


def test_moments_that_are_not_finite_are_refused_or_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write_dcp(tmp_path / "theirs", with_nan("exp_avg."))
    assert bring_in("dcp", source, tmp_path / "run", *MODEL) == 2
    assert f"non-finite numbers (exp_avg.{NAME}), found 3 of 1200" in capfd.readouterr().err
    assert bring_in("dcp", source, tmp_path / "run", "--weights-only", *MODEL) == 0
    assert not open_checkpoint(tmp_path / "run/iter_0000000", Files()).has_optimizer


def test_a_scalar_that_is_not_finite_is_refused() -> None:
    with refused(CheckpointError, "step", "1 of 1"):
        require_finite(torch.tensor(math.nan), where="step")


def test_a_run_does_not_begin_with_numbers_that_are_not_finite(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "theirs", weights_of(with_nan()))
    with refused(TrainerError, f"model.safetensors, {NAME}", "3 of 1200"):
        begin(tmp_path / "run", [*RUN, f"checkpoint.load={source}"])


def test_a_conversion_asks_nothing_of_the_keys_of_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_hf(tmp_path / "theirs", values())
    training = ["train.seq_length=4096", "train.micro_batch_size=7", "train.train_iters=1", "train.eval_iters=0"]
    assert bring_in("hf", source, tmp_path / "run", *MODEL, *training, "schedule.lr_warmup_iters=10") == 0
    assert "train.seq_length=4096" in caplog.text
    assert open_checkpoint(tmp_path / "run/iter_0000000", Files()).state["batch"]["seq_length"] == 32
    assert bring_in("hf", source, tmp_path / "other", *MODEL, "train.seq_length=0") == 2
    assert "train.seq_length=0" in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_resumes_from_moments_imported_without_its_keys(tmp_path: Path) -> None:
    source = write_dcp(tmp_path / "theirs", STATE)
    assert bring_in("dcp", source, tmp_path / "run/checkpoints", *MODEL, "train.global_batch_size=12") == 0
    rest = ["train.seq_length=32", "train.train_iters=4", "checkpoint.override_scheduler=true"]
    assert "iteration 3 from" in run_ok(tmp_path / "run", ["model=gpt2_tiny", *TINY, *rest]).text


TRAINER_FILES = ("optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth")


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_files_beside_the_weights_are_named_as_not_imported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: int
) -> None:
    source = write_hf(tmp_path / "checkpoint-3", values())
    assert bring_in("hf", source, tmp_path / "one") == 0
    assert "not carried" not in caplog.text
    for name in TRAINER_FILES:  # as transformers' Trainer names its files; what is in them does not matter
        torch.save({}, source / name)
    (source / "global_step3").mkdir()
    if ranks:
        text = run_ok(tmp_path / "run", [*RUN, "parallel=zero1", f"checkpoint.load={source}"], ranks=ranks).text
    else:
        assert bring_in("hf", source, tmp_path / "run") == 0
        text = caplog.text
    (line,) = (line for line in text.splitlines() if f"not carried from {source}: " in line)
    assert all(name in line for name in TRAINER_FILES[:4])
    assert "global_step3" in line


def write_megatron(folder: Path) -> Path:
    """Write what every folder of megatron.core.dist_checkpointing 0.16 has, and no tensor."""
    folder.mkdir(parents=True)
    versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", **versions}))
    torch.save({"iteration": 3}, folder / "common.pt")
    (folder / "__0_0.distcp").write_bytes(b"")
    # As Megatron pickles it, by name, so that nothing of torch's is needed to write it.
    (folder / ".metadata").write_bytes(b"ctorch.distributed.checkpoint.planner\nSavePlan\n.")
    return folder


@pytest.mark.parametrize(
    ("kind", "at"), [("dcp", "iter_0000003"), ("deepspeed", "."), ("hf", "."), ("hf", "iter_0000003"), ("run", ".")]
)
def test_a_megatron_folder_is_recognized_and_not_called_damaged(
    tmp_path: Path, kind: str, at: str, capfd: pytest.CaptureFixture[str]
) -> None:
    root, legacy = tmp_path / "saved", tmp_path / "legacy/iter_0000003"
    write_megatron(root / "iter_0000003")
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    (legacy / "mp_rank_00").mkdir(parents=True)
    (legacy / "mp_rank_00/model_optim_rng.pt").write_bytes(b"")
    if kind == "run":
        with refused(MismatchError, "convert import megatron", str(root)):
            begin(tmp_path / "run", ["model=gpt2_tiny", *TINY, f"checkpoint.load={root / at}"])
        return
    for folder in (root / at, legacy):
        assert bring_in(kind, folder, tmp_path / "run") == 2
        assert f"convert import megatron {folder if folder == legacy else root}" in capfd.readouterr().err


def test_metadata_with_foreign_classes_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cnemo.lightning\nPlan\n.")
    with refused(CheckpointError, "nemo.lightning.Plan", "another program"):
        states.opened("dcp", tmp_path, MODEL)


def test_another_model_with_torchtitan_s_names_is_explained(tmp_path: Path) -> None:
    save_dcp(tmp_path / "titan", {"tok_embeddings.weight": torch.zeros(257, 20)})
    with refused(MismatchError, "llama3", "torchtitan"):
        states.opened("dcp", tmp_path / "titan", ["model=llama3_tiny"])
