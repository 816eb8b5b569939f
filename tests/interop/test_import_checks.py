"""What an import refuses, what it does not ask for, and what it names as left behind, for every format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from models.families import aliases, stored_tensors
from reprise.errors import CheckpointError
from reprise.files import Files
from reprise.reading import open_checkpoint
from tests.harness import TINY, compose, launch, run_ok
from tests.interop.deepspeed_layout import MOMENTS, State, Way, write
from tests.interop.test_llmc import GPT2_HEADER, gpt2_order, make_gpt2, write_file
from trainer.commands import convert
from trainer.interop.finite import require_finite

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MODEL = ["model=gpt2_tiny", *TINY[:5]]
RUN = ["model=gpt2_tiny", *TINY, "train.train_iters=3", "checkpoint.finetune=true"]
NAME = "transformer.h.1.attn.c_attn.weight"  # [20, 60], which the model holds as [20, 3, 20]


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random float32 tensors of the tiny GPT-2, by name."""
    generator = torch.Generator().manual_seed(seed)
    stored = stored_tensors(compose(MODEL).model)
    return {name: torch.rand(tensor.shape, generator=generator) for name, tensor in stored.items()}


def with_nan(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, three numbers of `NAME` not finite, the first of them infinite."""
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    found[NAME][13, 47], found[NAME][13, 48], found[NAME][19, 59] = -math.inf, math.nan, math.nan
    return found


def write_hf(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 20, "n_inner": 44, "n_positions": 32, "vocab_size": 257}
    folder.mkdir()
    table = {"model_type": "gpt2", **sizes, "bos_token_id": 256, "eos_token_id": 256}
    (folder / "config.json").write_text(json.dumps(table))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_dcp(
    folder: Path, tensors: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor] | None = None
) -> Path:
    state = {name: dict.fromkeys(MOMENTS, value) | {"step": 3.0} for name, value in (moments or {}).items()}
    dcp.save({"model": dict(tensors), "optim": {"state": state}}, checkpoint_id=folder, no_dist=True)
    return folder


def write_deepspeed(
    folder: Path, tensors: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor] | None = None
) -> Path:
    kept = dict.fromkeys(MOMENTS, moments or values(1))
    write(folder, State(tensors, kept, 3.0, 3, aliases(compose(MODEL).model)), Way(2, 2))
    return folder


WRITERS = {"hf": write_hf, "dcp": write_dcp, "deepspeed": write_deepspeed}


def bring_in(kind: str, source: Path, folder: Path, *more: str) -> int:
    return convert.main(["import", kind, str(source), str(folder), "--trust-pickle", *more])


@pytest.mark.parametrize("kind", WRITERS)
def test_an_import_refuses_numbers_that_are_not_finite_by_tensor(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    source = WRITERS[kind](tmp_path / "theirs", with_nan(values()))
    assert bring_in(kind, source, tmp_path / "run", *MODEL) == 2
    text = capfd.readouterr().err
    assert "A tensor holds numbers that are not finite" in text
    assert NAME in text
    assert "found 3 of 1200, the first at [13, 47]: -inf" in text
    assert not list((tmp_path / "run").glob("iter_*"))
    assert not list((tmp_path / "run").glob(".*"))


@pytest.mark.parametrize("kind", ["dcp", "deepspeed"])
def test_an_import_refuses_moments_that_are_not_finite(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = {"dcp": write_dcp, "deepspeed": write_deepspeed}[kind]
    source = writer(tmp_path / "theirs", values(), with_nan(values(1)))
    assert bring_in(kind, source, tmp_path / "run", *MODEL) == 2
    assert f"not finite (exp_avg.{NAME}), found 3 of 1200" in capfd.readouterr().err
    assert bring_in(kind, source, tmp_path / "run", "--weights-only", *MODEL) == 0
    assert not open_checkpoint(tmp_path / "run/iter_0000000", Files()).has_optimizer


def test_the_index_of_a_scalar_that_is_not_finite_is_empty() -> None:
    with pytest.raises(CheckpointError, match=r"not finite \(step\), found 1 of 1, the first at \[\]: nan"):
        require_finite(torch.tensor(math.nan), where="step")


def test_an_import_of_a_file_of_llm_c_refuses_nan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = make_gpt2().state_dict()
    state["transformer.ln_f.bias"][5] = math.nan
    path = write_file(tmp_path / "model.bin", GPT2_HEADER, gpt2_order(state))
    assert bring_in("llmc", path, tmp_path / "run") == 2
    assert "not finite (transformer.ln_f.bias), found 1 of" in capfd.readouterr().err
    assert not list((tmp_path / "run").glob("iter_*"))


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [pytest.param(1, [], id="alone"), pytest.param(2, ["parallel=zero3"], id="parts", marks=pytest.mark.slow)],
)
def test_a_run_does_not_begin_with_numbers_that_are_not_finite(tmp_path: Path, ranks: int, parallel: list[str]) -> None:
    source = write_hf(tmp_path / "theirs", with_nan(values()))
    ended = launch(tmp_path / "run", [*RUN, *parallel, f"checkpoint.load={source}"], ranks=ranks)
    assert ended.statuses == (1,) * ranks
    assert "A tensor holds numbers that are not finite" in ended.text
    assert f"model.safetensors, {NAME}" in ended.text
    assert "the first at [13, 47]: -inf" in ended.text
    assert "Traceback" not in ended.text


@pytest.mark.parametrize(
    ("member", "number"),
    [("layer_norm_epsilon", 1e300), ("layer_norm_epsilon", -1e-5), ("layer_norm_epsilon", 2), ("n_embd", 10**400)],
)
def test_a_number_that_no_model_has_is_refused_by_name(
    tmp_path: Path, member: str, number: float, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_hf(tmp_path / "theirs", values())
    table = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**table, member: number}))
    assert bring_in("hf", source, tmp_path / "run") == 2
    text = capfd.readouterr().err
    assert "A folder holds an unsupported model" in text
    assert {"layer_norm_epsilon": "norm_eps"}.get(member, member) in text
    ended = launch(tmp_path / "begun", [*RUN, f"checkpoint.load={source}"])
    assert ended.statuses == (1,)
    assert "A folder holds an unsupported model" in ended.text


def test_an_integer_beyond_a_float_is_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=257)
    ).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    for theta in ("1" + 400 * "0", "1e300", "-1"):
        table = {**json.loads(path.read_text()), "rope_parameters": None}
        path.write_text(json.dumps({**table, "rope_theta": 0}).replace('"rope_theta": 0', f'"rope_theta": {theta}'))
        assert bring_in("hf", tmp_path / "theirs", tmp_path / "run") == 2
        assert "rope_theta=" in capfd.readouterr().err


@pytest.mark.parametrize("kind", WRITERS)
def test_a_conversion_asks_nothing_of_the_keys_of_training(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    source = WRITERS[kind](tmp_path / "theirs", values())
    training = ["train.seq_length=4096", "train.micro_batch_size=7", "train.train_iters=1", "train.eval_iters=0"]
    assert bring_in(kind, source, tmp_path / "run", *MODEL, *training, "schedule.lr_warmup_iters=10") == 0
    assert "train.seq_length=4096 is above the model's 32 positions: the checkpoint records 32" in caplog.text
    (path,) = (tmp_path / "run").glob("iter_*")
    assert open_checkpoint(path, Files()).state["batch"]["seq_length"] == 32
    assert bring_in(kind, source, tmp_path / "other", *MODEL, "train.seq_length=0") == 2
    assert "train.seq_length=0: must be at least 1" in capfd.readouterr().err


def test_a_run_resumes_from_moments_imported_without_its_keys(tmp_path: Path) -> None:
    source = write_deepspeed(tmp_path / "theirs", values(), {name: v * 1e-4 for name, v in values(1).items()})
    assert bring_in("deepspeed", source, tmp_path / "run/checkpoints", *MODEL, "train.global_batch_size=12") == 0
    rest = ["train.seq_length=32", "train.train_iters=4", "checkpoint.override_scheduler=true"]
    text = run_ok(tmp_path / "run", ["model=gpt2_tiny", *TINY, *rest]).text
    assert "iteration 3 from" in text


TRAINER_FILES = ("optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth")
NOT_CARRIED = (
    "optimizer.pt (the optimizer's moments), scheduler.pt (the schedule), trainer_state.json (the step and the log), "
    "rng_state_0.pth and 1 more (random generators)"
)


def trainer_folder(path: Path) -> Path:
    """Return a folder as transformers' Trainer names its files; what is in them does not matter."""
    write_hf(path, values())
    for name in TRAINER_FILES:
        torch.save({}, path / name)
    (path / "global_step3").mkdir()
    return path


def test_files_beside_the_weights_are_named_as_not_imported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert bring_in("hf", write_hf(tmp_path / "plain", values()), tmp_path / "one") == 0
    assert "not carried" not in caplog.text
    source = trainer_folder(tmp_path / "checkpoint-3")
    assert bring_in("hf", source, tmp_path / "run") == 0
    assert f"not carried from {source}: {NOT_CARRIED}; a run begins with the weights alone" in caplog.text
    assert f"not carried from {source}: global_step3 (DeepSpeed's checkpoint)" in caplog.text


@pytest.mark.slow
def test_a_run_from_a_trainer_s_folder_names_dropped_files_once(tmp_path: Path) -> None:
    source = trainer_folder(tmp_path / "checkpoint-3")
    ended = run_ok(tmp_path / "run", [*RUN, "parallel=zero1", f"checkpoint.load={source}"], ranks=2)
    assert ended.text.count(f"not carried from {source}: {NOT_CARRIED}; a run begins") == 1


def write_megatron(folder: Path, backend: str = "torch_dist") -> Path:
    """Write what every folder of megatron.core.dist_checkpointing 0.16 has, and no tensor."""
    folder.mkdir(parents=True)
    versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": backend, **versions}))
    torch.save({"iteration": 3}, folder / "common.pt")
    (folder / "__0_0.distcp").write_bytes(b"")
    # As Megatron pickles it, by name, so that nothing of torch's is needed to write it.
    (folder / ".metadata").write_bytes(b"ctorch.distributed.checkpoint.planner\nSavePlan\n.")
    return folder


@pytest.mark.parametrize("kind", ["dcp", "deepspeed", "hf"])
@pytest.mark.parametrize("at", ["iter_0000003", "."], ids=["iteration", "root"])
def test_a_megatron_folder_is_recognized_and_not_called_damaged(
    tmp_path: Path, kind: str, at: str, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "saved"
    write_megatron(root / "iter_0000003")
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    assert bring_in(kind, root / at, tmp_path / "run") == 2
    text = capfd.readouterr().err
    assert "MismatchError: The folder holds a Megatron checkpoint, which has to be imported first" in text
    assert "megatron.core.dist_checkpointing, sharded_backend 'torch_dist' in metadata.json" in text
    assert f"Run `reprise convert import megatron {root}" in text
    assert "damaged" not in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("at", ["", "iter_0000003"])
def test_a_run_that_loads_a_megatron_folder_names_the_program(tmp_path: Path, at: str) -> None:
    root = tmp_path / "saved"
    write_megatron(root / "iter_0000003")
    ended = launch(tmp_path / "run", ["model=gpt2_tiny", *TINY, f"checkpoint.load={root / at}"])
    assert ended.statuses == (1,)
    assert "MismatchError: The folder holds a Megatron checkpoint, which has to be imported first" in ended.text
    assert "damaged" not in ended.text


def test_the_legacy_form_of_megatron_is_named_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "iter_0000003/mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000003/mp_rank_00/model_optim_rng.pt").write_bytes(b"")
    assert bring_in("dcp", tmp_path / "iter_0000003", tmp_path / "run") == 2
    assert "Megatron-LM's format `torch`" in capfd.readouterr().err


def test_metadata_with_foreign_classes_is_not_called_damaged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (write_megatron(tmp_path / "saved") / "metadata.json").unlink()
    assert bring_in("dcp", tmp_path / "saved", tmp_path / "run") == 2
    text = capfd.readouterr().err
    assert "found torch.distributed.checkpoint.planner.SavePlan, which is no part of DCP's metadata" in text
    assert "Another program than torch wrote it" in text


def test_a_folder_above_one_dcp_checkpoint_counts_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_dcp(tmp_path / "steps/step-3", values())
    assert bring_in("dcp", tmp_path / "steps", tmp_path / "run", *MODEL) == 2
    text = capfd.readouterr().err
    assert "several" not in text
    assert f"Name {tmp_path / 'steps/step-3'}." in text
    write_dcp(tmp_path / "steps/step-6", values())
    assert bring_in("dcp", tmp_path / "steps", tmp_path / "run", *MODEL) == 2
    assert "A folder holds several DCP checkpoints" in capfd.readouterr().err


def test_another_model_with_torchtitan_s_names_is_explained(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_dcp(tmp_path / "titan", {"tok_embeddings.weight": torch.zeros(257, 20)})
    assert bring_in("dcp", tmp_path / "titan", tmp_path / "run", "model=llama3_tiny") == 2
    assert "llama3 under torchtitan's names" in capfd.readouterr().err
    write_dcp(tmp_path / "theirs", values())
    assert bring_in("dcp", tmp_path / "theirs", tmp_path / "run", *MODEL, "model.n_layer=3") == 2
    assert "gpt2 under transformers' names" in capfd.readouterr().err
