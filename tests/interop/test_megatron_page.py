"""Two pages of the documents: their flags are Megatron-LM's, their keys are ours, their commands compose."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from scripts.make_options import page as options_page
from tests.harness import compose
from trainer.config.checks import validate
from trainer.config.megatron_flags import DIFFERENCE, table
from trainer.schedules.batch_size import parse_batch_schedule

ROOT = Path(__file__).parents[2]
PAGE = "".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("from_megatron.md", "generated/megatron_flags.md")
)
OURS = {"--trust-pickle", "--nproc-per-node"}  # not Megatron-LM's, but of the commands that the page shows
KEYS = set(re.findall(r"^\| `([\w.]+)` \|", options_page(), flags=re.M))


def test_every_flag_of_the_page_is_one_of_megatron_lm() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", PAGE)) - OURS
    assert len(named) > 150
    listed = Path(__file__).with_name("megatron_flags.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(named - set(listed)) == []


def test_the_page_names_the_releases_that_are_tested() -> None:
    files = (ROOT / name for name in ("constraints.txt", "Makefile"))
    older, newest = (re.findall(r"megatron-core==([\d.]+)", file.read_text(encoding="utf-8")) for file in files)
    assert f"the releases {older[0]} and {newest[0]} of Megatron-Core" in PAGE.replace("\n", " ")


def test_every_key_of_the_page_is_one_of_ours() -> None:
    sections = {key.partition(".")[0] for key in KEYS}
    names = re.findall(r"(?<![\w/(])(\w+\.[\w.]*\w)", re.sub(r"\(\S+\)", "", PAGE))
    named = {name for name in names if name.partition(".")[0] in sections}
    assert len(named) > 70
    assert sorted(named - KEYS) == []


def test_a_flag_has_one_row_and_each_key_one_name() -> None:
    names = [flag for rows in table().values() for row in rows for flag in row if flag != DIFFERENCE]
    assert len(names) == len(set(names)) > 150
    assert all(re.fullmatch(r"--[\w-]+", name) for name in names)


def test_its_commands_compose() -> None:
    blocks = re.findall(r"^ *```(?:sh)?\n(.*?)^ *```", PAGE, flags=re.M | re.S)
    commands = [
        shlex.split(block.replace("\\\n", " ")) for block in blocks if re.match(r" *(reprise|torchrun) ", block)
    ]
    assert len(commands) == 2
    imported, launched = ([word for word in command if re.match(r"[a-z_.]+=", word)] for command in commands)
    assert min(len(imported), len(launched)) > 3
    described = ["model=gpt2_124m", *imported]  # an import takes the model from the checkpoint, a launch all of these
    validate(compose(described), world_size=1)
    validate(compose([*described, *launched]), world_size=8)


def test_the_program_for_a_ramp_up_prints_megatron_s_sizes() -> None:
    ((program, shown),) = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)\n```", PAGE, flags=re.M | re.S)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(program, "from_megatron.md", "exec"), {})  # noqa: S102 - our own document
    assert printed.getvalue().strip() == shown


@pytest.mark.parametrize("ramp", [(16, 8, 300, 64), (4, 4, 1000, 32), (1, 1, 7, 5), (8, 8, 100, 16)])
def test_the_program_agrees_with_megatron_everywhere(ramp: tuple[int, int, int, int]) -> None:
    start, increment, samples, last = ramp
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
    head, body = program.split("\n", 1)
    assert head == "start, increment, samples, last = 16, 8, 300_000, 64"
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(body, "from_megatron.md", "exec"), dict(zip(head.split(" = ")[0].split(", "), ramp, strict=True)))  # noqa: S102
    schedule = parse_batch_schedule(printed.getvalue())
    for consumed in range(samples + 10):
        # RampupBatchsizeNumMicroBatchesCalculator.update of earlier versions of megatron/core.
        share = samples / ((last - start) / increment)
        expected = last if consumed > samples else start + int(consumed / share) * increment
        assert schedule.at(consumed) == expected, consumed
