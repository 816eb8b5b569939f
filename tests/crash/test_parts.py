"""A folder that is one host's part of a checkpoint: no reader takes a hole for zeros, and `gather` makes it whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.crash.test_local_checkpoints import BASE, LOCAL, ZERO3, Fleet
from tests.harness import curve, launch, run_ok, tensor_files
from trainer.commands import checkpoint as checkpoint_command
from trainer.commands import convert, generate

pytestmark = pytest.mark.slow

NAME = "iter_0000004"
NOT_HELD = "A piece of a tensor lies on another host ("


def test_a_part_is_refused_and_gathered_it_is_the_shared_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, whole, next_run = Fleet(tmp_path), tmp_path / "whole", tmp_path / "next"
    ended = fleet.train([0, 1], [*ZERO3, *LOCAL, "checkpoint.local.copies=0", "train.exit_interval=4"])
    assert ended.ok, ended.text
    part, out = fleet.iteration(0, 4), tmp_path / "out"
    for verify in ("touched", "none"):
        options = [*BASE, *ZERO3, f"checkpoint.load={part}", f"checkpoint.verify={verify}"]
        refused = launch(next_run, options, ranks=2)
        assert refused.statuses == (1, 1), refused.text
        assert all(NOT_HELD in output and "`reprise checkpoint gather" in output for output in refused.outputs)
        assert "step     5/" not in refused.text
    assert generate.main([str(part), "--prompt", "a"]) == 2
    assert NOT_HELD in capsys.readouterr().err
    for number, kind in enumerate(("hf", "dcp")):
        assert convert.main(["export", kind, str(part), str(tmp_path / f"export{number}")]) != 0
        assert NOT_HELD in capsys.readouterr().err
        assert not (tmp_path / f"export{number}").exists()
    with pytest.raises(ValueError, match="Unrecognized model"):
        AutoModelForCausalLM.from_pretrained(part)

    hosts = [str(fleet.disk(0)), str(fleet.disk(1))]
    assert checkpoint_command.main(["gather", *hosts, str(out)]) == 0
    AutoModelForCausalLM.from_pretrained(out / NAME)
    run_ok(whole, [*BASE, *ZERO3, "checkpoint.save_interval=2"], ranks=2)
    assert tensor_files(out / NAME) == tensor_files(whole / "checkpoints" / NAME)
    names = [{path.name for path in folder.iterdir()} for folder in (out / NAME, whole / "checkpoints" / NAME)]
    assert names[0] == names[1]
    run_ok(next_run, [*BASE, *ZERO3, f"checkpoint.load={out}"], ranks=2)
    assert curve(next_run) == curve(whole)[4:]
