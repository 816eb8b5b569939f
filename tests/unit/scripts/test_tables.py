"""docs/support.md has the form that its script writes, and its commands run."""

from __future__ import annotations

import re
import shlex
from string import Template

import pytest

from scripts.make_tables import OUTPUT
from scripts.tables.page import page
from scripts.tables.runs import (
    NO_SAVE,
    SAVE_AGAIN,
    TOPOLOGIES,
    VARIANTS,
    ModelVariant,
    NamedTopology,
    Results,
    Resumed,
    pairs,
    resume_keys,
    straight_keys,
)
from trainer.config.checks import validate
from trainer.config.compose import compose

_VARIANT = re.compile(r"## (\w+), (\w+)")
_NAMES = r"`\w+`(?:, `\w+`)*"
_TARGET = r"`\w+`(?: \*\*\(other bytes\)\*\*)?"
_ROW = re.compile(rf"\| ({_NAMES}) \| (straight|{_TARGET}(?:, {_TARGET})*) \| (\S+).*? \| (\S+).*? \| (\S+).*? \|")


@pytest.fixture(scope="module")
def text() -> str:
    return OUTPUT.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def results(text: str) -> Results:
    """Return the results that the page shows."""
    found = Results()
    variant = ModelVariant("", "")
    for line in text.splitlines():
        if heading := _VARIANT.fullmatch(line):
            variant = ModelVariant(heading[1], heading[2])
        elif row := _ROW.fullmatch(line):
            sources, targets, *numbers = row.groups()
            for source in re.findall(r"`(\w+)`", sources):
                if targets == "straight":
                    found.straight[variant, source] = tuple(map(float, numbers))
                    continue
                pairs_of = zip(numbers, found.straight[variant, source], strict=True)
                losses = tuple(straight if number == "=" else float(number) for number, straight in pairs_of)
                for target, other in re.findall(r"`(\w+)`( \*\*)?", targets):
                    found.resumed[variant, source, target] = Resumed(is_bitwise=not other, losses=losses)
    return found


def test_the_page_is_that_of_its_results(text: str, results: Results) -> None:
    expected = {(variant, source.name, target.name) for variant in VARIANTS for source, target in pairs(variant)}
    assert results.resumed.keys() == expected
    assert page(results) == text, "`make tables` writes it anew"


def test_loads_are_bitwise_and_equal_topologies_equal_bits(results: Results) -> None:
    assert all(resumed.is_bitwise for resumed in results.resumed.values())
    same = [key for key in results.resumed if key[1] == key[2]]
    assert len(same) == len(TOPOLOGIES) + 2 * (len(VARIANTS) - 1)
    for variant, source, target in same:
        assert results.resumed[variant, source, target].losses == results.straight[variant, source]


@pytest.mark.slow
def test_every_command_of_the_page_is_one_that_composes(text: str) -> None:
    starts = dict(re.findall(r"^\| `(\w+)` \| `((?:reprise|torchrun) .*?)` \|$", text, re.M))
    straight, resume = (Template(block) for block in re.findall(r"^```\n(.*?)\n```$", text, re.M))
    commands = dict[str, tuple[NamedTopology, list[str]]]()
    for variant in VARIANTS:
        names = {"family": variant.family, "dtype": variant.dtype}
        for source in TOPOLOGIES:
            command = f"{starts[source.name]} {straight.substitute(names, source=source.name)}"
            commands[command] = (source, straight_keys(variant, source))
        for source, target in pairs(variant):
            command = f"{starts[target.name]} {resume.substitute(names, source=source.name, target=target.name)}"
            commands[command] = (target, resume_keys(variant, source, target))
    assert all(topology.command(keys) == command for command, (topology, keys) in commands.items())
    # The folders differ, the rest is that of a topology or of a variant.
    for topology, keys in _distinct(commands):
        validate(compose(keys), topology.ranks)


def _distinct(commands: dict[str, tuple[NamedTopology, list[str]]]) -> list[tuple[NamedTopology, list[str]]]:
    """Return one command for each topology, and one for each variant, and check that all are one line of shell."""
    found = dict[tuple[str, ...], tuple[NamedTopology, list[str]]]()
    for command, (topology, keys) in commands.items():
        assert shlex.split(command)[-len(keys) :] == keys
        is_resume = keys[-1] == NO_SAVE
        chosen = (
            (topology.name, "resume") if is_resume else tuple(key for key in keys if key.startswith(("model", "tr")))
        )
        if is_resume:
            keys = [*keys[:-1], SAVE_AGAIN]
        found.setdefault(chosen, (topology, keys))
    return list(found.values())
