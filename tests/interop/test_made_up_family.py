"""A family that a programmer adds is converted under its own name or refused by it, and so is a schedule.

The family has the tensors of LLaMA-3, so that nothing but its name tells the two apart.
"""

from __future__ import annotations

import json
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from models import families, llama3_spec
from models.config import Family
from reprise.errors import MismatchError
from reprise.loading import open_checkpoint
from reprise.storage import Files
from tests.interop.states import ALONE, cases, opened, random_state, state_of
from tests.interop.test_contract import LAYOUTS
from tests.messages import refused
from tests.unit.model_samples import LLAMA3
from trainer.commands import convert
from trainer.config.compose import compose
from trainer.config.saved import model_values
from trainer.interop.formats import ExportOptions
from trainer.interop.output import write_checkpoint
from trainer.interop.table import FORMATS
from trainer.schedules.lr import DecayStyle, RunLength, ScheduleSection, resolve

NAME = "geglu"
PRESET = compose(["model=llama3_tiny"]).model
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
    spec = replace(llama3_spec.SPEC, hf=hf, unused=unused, megatron=None)
    monkeypatch.setitem(families.FAMILIES, family, spec)
    return family


def saved(folder: Path, model: Any) -> Path:
    """Write a checkpoint of ours and return its folder."""
    return write_checkpoint(random_state(model), folder, compose(ALONE, model_values(model)))


@pytest.mark.parametrize("program", [name for name, program in FORMATS.items() if program.write is not None])
def test_an_export_names_a_new_family(
    tmp_path: Path, family: Family, capsys: pytest.CaptureFixture[str], program: str
) -> None:
    path, out = saved(tmp_path / "run", replace(LLAMA, family=family)), tmp_path / "out"
    status = convert.main(["export", program, str(path), str(out)])
    if program == "megatron":
        assert (status, out.exists()) == (2, False)
        assert f"model.family={NAME}" in capsys.readouterr().err
        return
    assert status == 0  # transformers' names, which every family has
    if program == "hf":
        assert json.loads((out / "config.json").read_text())["model_type"] == NAME
        return
    sizes = {key: value for key, value in model_values(LLAMA).items() if value != getattr(PRESET, key[6:])}
    like = ["model=llama3_tiny", *(f"{key}={value}" for key, value in sizes.items()), CALLED_GEGLU, *ALONE]
    assert convert.main(["import", program, str(out), str(tmp_path / "ours"), "--trust-pickle", *like]) == 0
    assert json.loads((tmp_path / "ours/iter_0000003/trainer_state.json").read_text())["model"]["family"] == NAME


@pytest.mark.parametrize("name", cases("hf, ranks", "llmc gpt2, nanogpt, fully"))
def test_an_import_takes_no_family_for_a_new_one(
    tmp_path: Path, family: Family, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    layout = LAYOUTS[name]
    source = layout.write(tmp_path / "source", state_of(layout.family))
    command = ["import", layout.kind, str(source), str(tmp_path / "ours"), "--trust-pickle", "--weights-only"]
    assert convert.main([*command, CALLED_GEGLU, *ALONE]) == 2
    assert NAME in capsys.readouterr().err
    assert not list((tmp_path / "ours").glob("iter_*"))


def test_arguments_of_megatron_must_fit_one_family(
    tmp_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = LAYOUTS["fully"].write(tmp_path, state_of("llama"))
    with refused(MismatchError, "swiglu=True", "gpt2"):
        opened("megatron", path, ["model=gpt2_tiny"])
    monkeypatch.setitem(families.FAMILIES, family, llama3_spec.SPEC)
    with refused(MismatchError, "llama3", NAME, "model=NAME"):
        opened("megatron", path, [])


def test_a_schedule_of_a_new_style_is_no_other_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(saved(tmp_path / "run", LLAMA), Files())
    style = add_member(monkeypatch, DecayStyle, "triangle")
    section = ScheduleSection(lr_decay_style=style, lr_warmup_iters=2, lr_decay_iters=10)
    schedule = resolve(section, RunLength(10, 80, False, 8), 1.0)
    with pytest.raises(AssertionError, match=r"DecayStyle\.triangle"):
        schedule.at(3, 24)
    record = {**dict(checkpoint.state["schedule"]), "style": "triangle"}
    write = FORMATS["megatron"].write
    assert write is not None
    with refused(MismatchError, "schedule.lr_decay_style=triangle"):
        write(replace(checkpoint, state={**checkpoint.state, "schedule": record}), tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out").exists()
