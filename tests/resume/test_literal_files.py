"""Text in the files of a checkpoint is taken literally: no interpolation in any field of any file is resolved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reprise.errors import TrainerError
from reprise.storage import FILE_SYSTEM
from tests.harness import checkpoint
from tests.unit.reprise.format.test_document import reseal, rewrite
from trainer.config.compose import CommandLine, over_saved, resolve

SECRET = "the-secret-of-this-machine"
EXPRESSION = "${oc.env:REPRISE_TEST_SECRET}"
Place = tuple[str | int, ...]


def leaves(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the place of every text and number in a JSON value."""
    if not isinstance(value, dict | list):
        yield place
        return
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(member, (*place, key))


def with_expression(data: bytes, place: Place) -> bytes:
    """Return a JSON file with the expression at a place."""
    document = json.loads(data)
    node = document
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = EXPRESSION
    return json.dumps(document, separators=(",", ":")).encode()


def outcome(command: CommandLine) -> str:
    """Return what a command says that takes its configuration from the checkpoint."""
    try:
        return resolve(over_saved(command, FILE_SYSTEM)).text
    except TrainerError as error:
        return str(error)


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_field_of_a_checkpoint_is_resolved(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, every: int
) -> None:
    saved = checkpoint(run, 2)
    monkeypatch.setenv("REPRISE_TEST_SECRET", SECRET)
    command, texts = CommandLine((f"checkpoint.load={saved}",)), []
    for path in sorted(saved.glob("*.json")):
        whole = {name: (saved / name).read_bytes() for name in (path.name, "manifest.json")}
        places = list(leaves(json.loads(path.read_bytes())))
        topology = [place for place in places if path.name == "trainer_state.json" and place[0] == "topology"]
        for place in [*topology, *places[::every]]:
            if path.name != "manifest.json":
                rewrite(saved, path.name, lambda data, place=place: with_expression(data, place))
            elif place != ("xxh3_64",):
                reseal(saved, lambda body, place=place: with_expression(body + b"}", place)[:-1])
            texts.append(outcome(command))
            for name, data in whole.items():
                (saved / name).write_bytes(data)
    assert len(texts) > 20
    assert not [text for text in [*texts, caplog.text] if SECRET in text]
    assert sum(EXPRESSION in text for text in texts) > len(texts) // 10, "it has reached the configuration as text"
