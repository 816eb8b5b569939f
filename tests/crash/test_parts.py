"""A folder that is one host's part of a checkpoint: no reader takes a hole for zeros, and `gather` makes it whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.crash.test_local_checkpoints import BASE, EVERY_2, LOCAL, ZERO3, Fleet, copies_on, exit_after
from tests.harness import all_files, checkpoint, curve, launch, run_ok, tensor_files
from trainer.commands import checkpoint as checkpoint_command
from trainer.commands import convert, generate

pytestmark = pytest.mark.slow

NOT_HELD = "A tensor piece is on another host ("


def test_a_part_is_refused_and_gathered_it_is_the_shared_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, whole, further, export = Fleet(tmp_path), tmp_path / "whole", tmp_path / "next", tmp_path / "export"
    fleet.train([0, 1], *ZERO3, *LOCAL, copies_on(0), exit_after(4))
    part, out = fleet.iteration(0, 4), tmp_path / "out"
    refused = launch(further, [*BASE, *ZERO3, f"checkpoint.load={part}"], ranks=2)
    assert refused.statuses == (1, 1), refused.text
    assert all(NOT_HELD in output and "`reprise checkpoint gather" in output for output in refused.outputs)
    assert generate.main([str(part), "--prompt", "a"]) == 2
    for kind in ("hf", "dcp"):
        assert convert.main(["export", kind, str(part), str(export)]) != 0
        assert not export.exists()
    assert capsys.readouterr().err.count(NOT_HELD) == 3
    with pytest.raises(ValueError, match="Unrecognized model"):
        AutoModelForCausalLM.from_pretrained(part)

    assert checkpoint_command.main(["gather", str(fleet.disk(0)), str(fleet.disk(1)), str(out)]) == 0
    AutoModelForCausalLM.from_pretrained(out / part.name)
    run_ok(whole, [*BASE, *ZERO3, EVERY_2], ranks=2)
    assert tensor_files(out / part.name) == tensor_files(checkpoint(whole, 4))
    assert all_files(out / part.name).keys() == all_files(checkpoint(whole, 4)).keys()
    run_ok(further, [*BASE, *ZERO3, f"checkpoint.load={out}"], ranks=2)
    assert curve(further) == curve(whole)[4:]
