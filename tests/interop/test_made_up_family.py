"""A family that a programmer adds is converted under its own name or refused by it, and so is a schedule.

The family has the tensors of LLaMA-3, so that nothing but its name tells the two apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from models import families, llama3_spec
from models.config import Family
from models.families import stored_tensors
from reprise.errors import MismatchError
from reprise.files import Files
from reprise.reading import open_checkpoint
from tests.harness import TINY
from tests.interop import megatron_layout, torch_dist_layout
from tests.interop.megatron_layout import Way
from tests.interop.torch_dist_layout import Form
from tests.unit.model_samples import GPT2, LLAMA3
from trainer.commands import convert
from trainer.config.compose import compose
from trainer.interop.formats import ExportOptions, ImportOptions
from trainer.interop.megatron.export import arguments_of
from trainer.interop.output import write_checkpoint
from trainer.interop.source import StateSource
from trainer.interop.table import FORMATS
from trainer.schedules.lr import DecayStyle, RunLength, ScheduleSection, resolve

NAME = "geglu"
RUN = [override for override in TINY if not override.startswith("model.")]
LLAMA = replace(LLAMA3, rope_scaling=None, head_dim=None)
CALLED_GEGLU = f"model.family={NAME}"


def add_member(monkeypatch: pytest.MonkeyPatch, members: type[Enum], name: str) -> Any:
    """Add a member to an enumeration, as its source would."""
    member = object.__new__(members)
    member._name_, member._value_ = name, name
    for table in (members._member_map_, members._value2member_map_):
        monkeypatch.setitem(table, name, member)
    monkeypatch.setattr(members, "_member_names_", [*members._member_names_, name])
    return member


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Family:
    """Add a family with transformers' names and none of other programs, the least that a spec has."""
    family = add_member(monkeypatch, Family, NAME)
    hf = replace(llama3_spec.SPEC.hf, architecture="GegluForCausalLM", model_type=NAME)
    unused = dict.fromkeys(llama3_spec.SPEC.unused, f"{NAME} has none")
    spec = replace(llama3_spec.SPEC, hf=hf, unused=unused, megatron=None, scaled_preset=None)
    monkeypatch.setitem(families.FAMILIES, family, spec)
    return family


def state(model: Any) -> StateSource:
    generator = torch.Generator().manual_seed(1)
    tensors = dict[str, torch.Tensor]()
    for name, stored in stored_tensors(model).items():
        for prefix in ("", "exp_avg.", "exp_avg_sq."):
            tensors[prefix + name] = torch.rand(stored.shape, generator=generator)
        tensors[f"step.{name}"] = torch.tensor(3.0)
    return StateSource(model, 3, has_optimizer=True, read=tensors.__getitem__)


def saved(folder: Path, model: Any) -> Path:
    """Write a checkpoint of ours and return its folder."""
    like = [*convert.model_overrides(replace(model, family=Family.llama3)), f"model.family={model.family.value}"]
    return write_checkpoint(state(model), folder, compose([*like, *RUN]))


@pytest.mark.parametrize("program", [name for name, program in FORMATS.items() if program.write is not None])
def test_an_export_names_a_new_family(
    tmp_path: Path, family: Family, capsys: pytest.CaptureFixture[str], program: str
) -> None:
    path = saved(tmp_path / "run", replace(LLAMA, family=family))
    status = convert.main(["export", program, str(path), str(tmp_path / "out")])
    if program in ("megatron", "llmc"):
        assert (status, (tmp_path / "out").exists()) == (2, False)
        assert f"model.family={NAME}" in capsys.readouterr().err
    else:  # transformers' names, which every family has
        assert status == 0
        assert (
            not (table := tmp_path / "out/config.json").exists() or json.loads(table.read_text())["model_type"] == NAME
        )


def write_nanogpt(folder: Path, llama: Path) -> Path:
    del llama
    turned = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    model = replace(GPT2, intermediate_size=4 * GPT2.n_embd, tie_word_embeddings=True)
    source = state(model)
    values = {name: source.read(name) for name in stored_tensors(model)}
    weights = {name: value.T.contiguous() if name.endswith(turned) else value for name, value in values.items()}
    folder.mkdir()
    sizes = {"n_layer": model.n_layer, "n_head": model.n_head, "n_embd": model.n_embd, "vocab_size": model.vocab_size}
    table = {"model": weights, "model_args": {**sizes, "block_size": 48, "bias": True, "dropout": 0.0}, "iter_num": 3}
    torch.save(table, folder / "ckpt.pt")
    return folder


def export_as(program: str) -> Callable[[Path, Path], Path]:
    def export(folder: Path, llama: Path) -> Path:
        assert convert.main(["export", program, str(llama), str(folder)]) == 0
        return folder

    return export


# A checkpoint of LLaMA-3, or of GPT-2 for nanoGPT, in each format that says of which family it is.
WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    "hf": export_as("hf"),
    "llmc": export_as("llmc"),
    "nanogpt": write_nanogpt,
    "megatron": export_as("megatron"),
    "megatron, torch_dist": lambda folder, _: torch_dist_layout.write(folder, state(LLAMA), Way(), Form()),
    "megatron, legacy": lambda folder, _: megatron_layout.write(folder, state(LLAMA), Way(names="newer")),
    "deepspeed": lambda folder, _: megatron_layout.write_deepspeed(folder, state(LLAMA), Way(names="mds")),
}


@pytest.mark.parametrize("program", WRITERS)
def test_an_import_takes_no_family_for_a_new_one(
    tmp_path: Path, family: Family, capsys: pytest.CaptureFixture[str], program: str
) -> None:
    source = WRITERS[program](tmp_path / "source", saved(tmp_path / "run", LLAMA))
    command = ["import", program.partition(",")[0], str(source), str(tmp_path / "ours"), "--trust-pickle"]
    assert convert.main([*command, "--weights-only", CALLED_GEGLU, *RUN]) == 2
    assert NAME in capsys.readouterr().err
    assert not list((tmp_path / "ours").glob("iter_*"))


def test_an_import_of_dcp_keeps_a_new_family(tmp_path: Path, family: Family) -> None:
    path = saved(tmp_path / "run", replace(LLAMA, family=family))
    assert convert.main(["export", "dcp", str(path), str(tmp_path / "dcp")]) == 0
    like = [*convert.model_overrides(LLAMA), CALLED_GEGLU]
    assert (
        convert.main(["import", "dcp", str(tmp_path / "dcp"), str(tmp_path / "ours"), "--trust-pickle", *like, *RUN])
        == 0
    )
    assert json.loads((tmp_path / "ours/iter_0000003/trainer_state.json").read_text())["model"]["family"] == NAME


def test_overrides_that_contradict_megatron_are_refused(tmp_path: Path) -> None:
    path = torch_dist_layout.write(tmp_path, state(LLAMA), Way(), Form())
    asked = ImportOptions(compose(["model=gpt2_tiny"]), trusts_pickle=True, overrides=["model=gpt2_tiny"])
    read = FORMATS["megatron"].read
    assert read is not None
    with pytest.raises(MismatchError, match="swiglu=True: gpt2 has False"):
        read(path, asked)


def test_two_families_of_equal_arguments_need_a_name(tmp_path: Path, family: Family, monkeypatch: Any) -> None:
    monkeypatch.setitem(families.FAMILIES, family, llama3_spec.SPEC)
    path = torch_dist_layout.write(tmp_path, state(LLAMA), Way(), Form())
    read = FORMATS["megatron"].read
    assert read is not None
    with pytest.raises(MismatchError, match="args fit llama3 and geglu alike: set model=NAME"):
        read(path, ImportOptions(compose([]), trusts_pickle=True))
    assert arguments_of(LLAMA)["swiglu"] is True


def test_a_schedule_of_a_new_style_is_no_other_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    style = add_member(monkeypatch, DecayStyle, "triangle")
    section = ScheduleSection(lr_decay_style=style, lr_warmup_iters=2, lr_decay_iters=10)
    schedule = resolve(section, RunLength(10, 80, False, 8), 1.0)
    with pytest.raises(AssertionError, match=r"DecayStyle\.triangle"):
        schedule.at(1, 8)


def test_an_export_names_a_new_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "run", LLAMA)
    add_member(monkeypatch, DecayStyle, "triangle")
    checkpoint = open_checkpoint(path, Files())
    schedule = {**dict(checkpoint.state["schedule"]), "style": "triangle"}
    write = FORMATS["megatron"].write
    assert write is not None
    with pytest.raises(MismatchError, match=r"found schedule\.lr_decay_style=triangle"):
        write(replace(checkpoint, state={**checkpoint.state, "schedule": schedule}), tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out").exists()
