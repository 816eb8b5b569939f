"""Checkpoints of Megatron-LM's format `torch` are imported bit for bit, however the run was laid out over its ranks."""

from __future__ import annotations

import re
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.families import stored_tensors
from reprise.errors import ConfigError, TrainerError
from reprise.files import Files
from reprise.reading import open_checkpoint
from tests.harness import TINY, compose, curve, run_ok, tensor_files
from tests.interop import megatron_layout
from tests.interop.megatron_layout import Way, write, write_deepspeed
from trainer.commands import convert
from trainer.interop.deepspeed import source as deepspeed
from trainer.interop.formats import ImportOptions
from trainer.interop.megatron.source import read_source
from trainer.interop.output import write_checkpoint
from trainer.interop.source import StateSource, of_checkpoint

SAVED, END = 3, 8
SIZES = ["model.n_layer=4", "model.n_head=4", "model.n_embd=24", "model.bos_token_id=256", "model.eos_token_id=256"]
RUN = [*TINY, *SIZES, f"train.train_iters={END}", "optimizer.lr=1e-2", f"checkpoint.save_interval={SAVED}"]
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
    "tp2 pp2 dp2 of 2023": Way(tp=2, pp=2, dp=2, names="newer", form="data ranks", dtype=BF16),
    "tp2 vpp2 dp3 of 2023": Way(tp=2, vpp=2, dp=3, names="newer", form="data ranks"),
    "pp2 legacy, nothing aligned": Way(pp=2, dp=3, names="newer", form="older", alignment=1, bucket=3000),
}


def of_both_models(ways: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test for each layout and model; in the gate, each layout is that of one of the two models."""
    dear = [pytest.mark.slow, pytest.mark.nightly]
    cases = [
        pytest.param(model, way, marks=dear if (number + other) % 2 else ())
        for other, model in enumerate(MODELS)
        for number, way in enumerate(ways)
    ]
    return pytest.mark.parametrize(("trained", "way"), cases, indirect=["trained"])


@of_both_models(WAYS)
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


@of_both_models(DEEPSPEED)
def test_megatron_deepspeed_gives_the_bytes_it_was_made_from(
    trained: tuple[list[str], Path], tmp_path: Path, way: str
) -> None:
    overrides, saved = trained
    laid_out, is_pipe = DEEPSPEED[way]
    path = write_deepspeed(tmp_path / "ds", source_of(saved), laid_out, is_pipe=is_pipe)
    made = write_checkpoint(opened_deepspeed(path.parent, overrides), tmp_path / "run", compose(overrides))
    assert tensor_files(made) == tensor_files(saved)


@pytest.mark.parametrize(
    ("version", "others"),
    [(3.0, {"ds_sequence_parallel_size": 2}), (0, {"ds_sequence_parallel_fpdt": False})],
    ids=["Ulysses of 2023", "since December 2024"],
)
def test_rows_of_megatron_deepspeed_follow_its_version(
    small: tuple[list[str], StateSource],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    version: float,
    others: dict[str, Any],
) -> None:
    caplog.set_level("INFO", logger="trainer.interop")
    overrides, source = small
    path = write_deepspeed(tmp_path, source, Way(tp=2, dp=2, names="mds", version=version), **others)
    for file in path.glob("mp_rank_*"):
        change(file, lambda saved: saved.update(checkpoint_version=3.0))  # as every version names it
    found = opened_deepspeed(path, overrides)
    for name in (f"{kind}transformer.h.1.attn.c_attn.{one}" for kind in ("", "exp_avg.") for one in ("weight", "bias")):
        assert torch.equal(found.read(name), source.read(name)), name
    assert f"rows of query_key_value as {'before' if version else 'since'} December 2024" in caplog.text


@pytest.mark.parametrize(("names", "expected"), [("newer", "gelu_tanh"), ("local", "gelu"), ("mds", "gelu_tanh")])
def test_openai_gelu_is_that_of_megatron_lm_s_own_models(
    small: tuple[list[str], StateSource], tmp_path: Path, names: str, expected: str
) -> None:
    overrides, source = small
    way, own = Way(names=names), {"openai_gelu": True, "bias_gelu_fusion": False}
    if names == "mds":
        found = opened_deepspeed(write_deepspeed(tmp_path, source, way, **own), overrides)
    else:
        found = opened(write(tmp_path, source, way, **own), overrides)
    assert found.model.activation.value == expected


def test_grouped_queries_in_an_order_without_groups_are_refused(tmp_path: Path) -> None:
    overrides = [*MODELS["llama3"], *RUN, "model.n_layer=2"]
    model = compose(overrides).model
    values = {name: torch.zeros(stored.shape) for name, stored in stored_tensors(model).items()}
    source = StateSource(
        model, SAVED, True, lambda name: values[name.removeprefix("exp_avg.").removeprefix("exp_avg_sq.")]
    )
    path = write_deepspeed(tmp_path, source, Way(names="mds"), ds_sequence_parallel_fpdt=False)
    with pytest.raises(TrainerError, match=r"rows of fused queries.* 4 heads .* 2 of"):
        opened_deepspeed(path, overrides)


def opened_deepspeed(path: Path, overrides: list[str], **options: Any) -> StateSource:
    asked = ImportOptions(compose(overrides), trusts_pickle=True, overrides=overrides, **options)
    return deepspeed.read_source(path, asked)


# ---- by the command


@pytest.mark.parametrize("trained", ["gpt2"], indirect=True)
def test_an_imported_run_goes_on_with_the_bits_of_its_source(trained: tuple[list[str], Path], tmp_path: Path) -> None:
    overrides, saved = trained
    way, folders = Way(tp=2, pp=2, dp=2, names="mds"), {"megatron": tmp_path / "torch", "deepspeed": tmp_path / "ds"}
    write(folders["megatron"], source_of(saved), way)
    write_deepspeed(folders["deepspeed"], source_of(saved), way)
    for name, folder in folders.items():
        command = ["import", name, str(folder), str(tmp_path / name / "checkpoints"), "--trust-pickle"]
        # The arguments describe the model, except the tokens that begin and end a document.
        assert convert.main([*command, *(o for o in overrides if not o.startswith("model") or "token_id" in o)]) == 0
        run_ok(tmp_path / name, overrides)
        assert curve(tmp_path / name) == curve(saved.parents[1])[SAVED:]


# ---- what is refused


@pytest.fixture(scope="module")
def small() -> tuple[list[str], StateSource]:
    """A GPT-2 of random values, and its overrides."""
    overrides = [*MODELS["gpt2"], *RUN, "model.n_layer=2"]
    model, generator = compose(overrides).model, torch.Generator().manual_seed(1)
    values: dict[str, torch.Tensor] = {}
    for name, stored in stored_tensors(model).items():
        for key in ("", "exp_avg.", "exp_avg_sq."):
            values[key + name] = torch.rand(stored.shape, generator=generator)
    return overrides, StateSource(model, SAVED, has_optimizer=True, read=values.__getitem__)


def change(path: Path, alter: Callable[[dict[Any, Any]], object]) -> None:
    """Rewrite a file of torch with a change."""
    saved = torch.load(path, weights_only=False)
    alter(saved)
    torch.save(saved, path)


def read_all(source: StateSource) -> None:
    for name in stored_tensors(source.model):
        for key in ("", "exp_avg.", "exp_avg_sq.") if source.has_optimizer else ("",):
            source.read(key + name)


def assert_same(found: StateSource, source: StateSource) -> None:
    for name in stored_tensors(source.model):
        for key in ("", "exp_avg.", "exp_avg_sq."):
            assert torch.equal(found.read(key + name), source.read(key + name)), key + name


def refusal(path: Path, overrides: list[str], **options: Any) -> str:
    with pytest.raises(TrainerError) as caught:
        read_all(opened(path, overrides, **options))
    return str(caught.value)


def drift(saved: dict[Any, Any]) -> None:
    saved["model"]["decoder.layers.0.self_attention.linear_proj.bias"][3] += 1


def swap(saved: dict[Any, Any]) -> None:
    names = [f"decoder.layers.{layer}.self_attention.linear_proj.weight" for layer in (0, 1)]
    model = saved["model"]
    model[names[0]], model[names[1]] = model[names[1]], model[names[0]]


def move(saved: dict[Any, Any]) -> None:
    flat = next(iter(saved[0].values()))
    flat["param"] = flat["param"].roll(1)


def drop(saved: dict[Any, Any]) -> None:
    saved["model"].pop("decoder.layers.1.mlp.linear_fc1.bias")


def freeze(saved: dict[Any, Any]) -> None:
    saved["optimizer"]["param_groups"][0]["params"].pop()


def cut_state(saved: dict[Any, Any]) -> None:
    saved["optimizer"]["state"][2].pop("exp_avg_sq")


TP2, PP2 = Way(tp=2), Way(pp=2)
PLAIN = Way(is_distributed=False)
MODEL_FILE, FLAT_FILE = "mp_rank_00/model_optim_rng.pt", "mp_rank_00/distrib_optim.pt"
REFUSED: dict[str, tuple[Way, str, Callable[[dict[Any, Any]], object], str]] = {
    "ranks that drifted apart": (
        replace(TP2, is_distributed=False),
        "mp_rank_01/model_optim_rng.pt",
        drift,
        "copies of a tensor on ranks 0 and 1 of tensor parallelism differ .*linear_proj.bias.* 1 of 24 numbers",
    ),
    "a buffer of another save": (Way(), MODEL_FILE, swap, "linear_proj.weight.* expected 576 numbers that round to"),
    "a buffer that is not aligned": (Way(), FLAT_FILE, move, "does not hold the weights of a parameter"),
    "a missing parameter": (PLAIN, MODEL_FILE, drop, "It is not certain which moments"),
    "a frozen parameter": (PLAIN, MODEL_FILE, freeze, "two groups: 10 matrices, 18 biases and vectors"),
    "a lacking moment": (PLAIN, MODEL_FILE, cut_state, "1 of 28 without them, the first is number 2"),
    "another save": (TP2, "mp_rank_01/model_optim_rng.pt", lambda s: s.update(iteration=2), "of several saves"),
    "another version": (TP2, MODEL_FILE, lambda s: s.update(checkpoint_version=2.0), "of several saves"),
    "an unknown version": (PLAIN, MODEL_FILE, lambda s: s.update(checkpoint_version=4.0), "version that is not known"),
    "no arguments": (Way(), MODEL_FILE, lambda s: s.pop("args"), "args have no position_embedding_type"),
    "an optimizer that is chained": (Way(), MODEL_FILE, lambda s: s.update(optimizer=[{}]), "chained optimizers"),
    "two steps": (
        PLAIN,
        MODEL_FILE,
        lambda s: s["optimizer"]["state"][0].update(step=torch.tensor(2.0)),
        r"several: \[2.0, 3.0\]",
    ),
    "another tied copy": (
        replace(PP2, is_distributed=False),
        "mp_rank_00_001/model_optim_rng.pt",
        lambda s: s["model"]["output_layer.weight"].mul_(2),
        "on the first and the last stage differ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_together_is_refused_by_name(
    small: tuple[list[str], StateSource], tmp_path: Path, case: str
) -> None:
    (overrides, source), (way, file, alter, said) = small, REFUSED[case]
    if case == "no arguments":
        overrides = [o for o in overrides if not o.startswith(("model=", "model.n_layer"))]
    path = write(tmp_path, source, way)
    change(path / file, alter)
    assert re.search(said, refusal(path, overrides), flags=re.S), refusal(path, overrides)


def test_the_first_of_copies_that_drifted_apart_is_taken(
    small: tuple[list[str], StateSource],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overrides, source = small
    tied = REFUSED["another tied copy"]
    cases = {"drifted": (replace(TP2, is_distributed=False), drift), "tied": (tied[0], tied[2])}
    for name, (way, alter) in cases.items():
        path = write(tmp_path / name, source, way)
        change(path / (tied[1] if name == "tied" else "mp_rank_01/model_optim_rng.pt"), alter)
        caplog.clear()
        found = opened(path, overrides, from_rank0=True)
        assert_same(found, source)
        assert_same(found, source)
        lines = [line for line in caplog.messages if "the first copy is taken" in line]
        assert len(lines) == 1, lines
        assert re.search(
            r"(linear_proj\.bias: 1 of 24 .* at most 1:|word_embeddings.*first and the last stage)", lines[0]
        )
    lay_out = megatron_layout._chunk

    def drifted(*args: Any) -> Any:
        """Return the parts of a rank with other biases, in all their kinds, on the second of tensor parallelism."""
        found, tp = lay_out(*args), args[3]
        return {
            name: {key: value + (tp == 1 and name.endswith("linear_proj.bias")) for key, value in values.items()}
            for name, values in found.items()
        }

    monkeypatch.setattr(megatron_layout, "_chunk", drifted)
    path = write(tmp_path / "flat", source, TP2)
    assert "copies of a tensor on ranks 0 and 1" in refusal(path, overrides)
    assert_same(opened(path, overrides, from_rank0=True), source)
    path = write_deepspeed(tmp_path / "ds", source, Way(tp=2, names="mds"))
    assert_same(opened_deepspeed(path, overrides, from_rank0=True), source)
    others = [o for o in overrides if not o.startswith("model") or "token_id" in o]
    command = ["import", "deepspeed", str(path), str(tmp_path / "out"), "--trust-pickle", *others]
    assert (convert.main(command), convert.main([*command, "--from-rank0"])) == (2, 0)


def test_classes_registered_with_torch_change_nothing(small: tuple[list[str], StateSource], tmp_path: Path) -> None:
    """`import megatron.core` registers the class of its arguments with torch, for the whole process."""
    overrides, source = small
    path = write(tmp_path, source, Way(rows=264))
    with torch.serialization.safe_globals([Namespace]):
        registered = set(torch.serialization.get_safe_globals())
        found = opened(path, [o for o in overrides if not o.startswith("model=")])
        assert set(torch.serialization.get_safe_globals()) == registered
    assert found.model == source.model


def test_files_that_are_missing_or_damaged_are_named(small: tuple[list[str], StateSource], tmp_path: Path) -> None:
    overrides, source = small
    path = write(tmp_path, source, Way(tp=2, pp=2))
    flat = path / "mp_rank_01_001/distrib_optim.pt"
    flat.write_bytes(flat.read_bytes()[:-1000])
    assert str(flat) in refusal(path, overrides)
    read_all(opened(path, overrides, weights_only=True))
    flat.unlink()
    assert "Some ranks lack distrib_optim.pt" in refusal(path, overrides)
    for other in path.glob("*/distrib_optim.pt"):
        other.unlink()
    assert "expected distrib_optim.pt" in refusal(path, overrides)
    shutil.rmtree(flat.parent)
    assert "no mp_rank_01_001" in refusal(path, overrides)
    (path / "mp_rank_00_000_001").mkdir()
    assert "mp_rank_00_000_001" in refusal(path, overrides)


@pytest.mark.parametrize("key", ["", "exp_avg."])
def test_a_flipped_bit_is_found_and_its_file_named(
    small: tuple[list[str], StateSource], tmp_path: Path, key: str
) -> None:
    overrides, source = small
    path = write(tmp_path, source, PLAIN)
    file = path / MODEL_FILE
    data = bytearray(file.read_bytes())
    data[data.find(source.read(f"{key}transformer.wpe.weight").numpy().tobytes()[:64]) + 5] ^= 1
    file.write_bytes(data)
    said = refusal(path, overrides)
    assert str(file) in said
    assert "another checksum of" in said


def test_a_file_of_torch_before_its_zip_archives_is_named(small: tuple[list[str], StateSource], tmp_path: Path) -> None:
    overrides, source = small
    path = write(tmp_path, source, Way(names="older", version=0, is_distributed=False))
    saved = torch.load(path / MODEL_FILE, weights_only=False)
    torch.save(saved, path / MODEL_FILE, _use_new_zipfile_serialization=False)
    assert "form of torch before 1.6" in refusal(path, overrides)


def test_a_data_parallel_rank_that_is_missing_is_named(small: tuple[list[str], StateSource], tmp_path: Path) -> None:
    overrides, source = small
    path = write(tmp_path, source, Way(dp=3, form="data ranks"))
    shutil.rmtree(path / "mp_rank_00_002")
    assert "does not hold its parts of the parameters" in refusal(path, overrides)
    read_all(opened(path, overrides, weights_only=True))
    path = write(tmp_path / "counted", source, Way(dp=3, form="data ranks"), data_parallel_size=3)
    shutil.rmtree(path / "mp_rank_00_002")
    assert "expected 3 folders mp_rank_00_DDD" in refusal(path, overrides)


def test_code_in_a_file_of_megatron_does_not_run(small: tuple[list[str], StateSource], tmp_path: Path) -> None:
    overrides, source = small
    path, proof = write(tmp_path / "megatron", source, Way()), tmp_path / "ran"
    before = [source.read(name) for name in stored_tensors(source.model)]
    change(path / MODEL_FILE, lambda saved: saved.update(harm=Harm(subprocess.call, ["touch", str(proof)])))
    found = opened(path, overrides)
    assert all(torch.equal(found.read(n), t) for n, t in zip(stored_tensors(source.model), before, strict=True))
    change(path / FLAT_FILE, lambda saved: saved.update(harm=Harm(Path.touch, proof)))
    assert "A file of torch cannot be read" in refusal(path, overrides)
    with pytest.raises(ConfigError, match="--trust-pickle"):
        read_source(path, ImportOptions(compose(overrides)))
    assert not proof.exists()


class Harm:
    """Calls a function when it is unpickled."""

    def __init__(self, call: Callable[..., object], argument: object) -> None:
        self.call, self.argument = call, argument

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, (self.argument,)


def test_what_megatron_deepspeed_lacks_is_named(small: tuple[list[str], StateSource], tmp_path: Path) -> None:
    overrides, source = small
    path = write_deepspeed(tmp_path, source, Way(tp=2, pp=2, dp=2, names="mds"))

    def said() -> str:
        with pytest.raises(TrainerError) as caught:
            read_all(opened_deepspeed(path, overrides))
        return str(caught.value)

    change(path / "layer_02-model_01-model_states.pt", lambda saved: saved["self_attention.dense.bias"].add_(1))
    assert "copies of a tensor on ranks 0 and 1 of tensor parallelism differ" in said()
    (path / "zero_pp_rank_1_mp_rank_03_optim_states.pt").unlink()
    assert "optim_states of rank 1" in said()
    (path / "layer_03-model_00-model_states.pt").unlink()
    (path / "mp_rank_03_model_states.pt").unlink()
    assert "missing or beyond: 03" in said()
    (path / "layer_02_expert_0").touch()
    assert "with experts is not imported" in said()
