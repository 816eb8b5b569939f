"""The fuzzer tries inputs that lead further, and keeps what breaks something."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise.errors import TrainerError
from scripts.faults import fuzz_inputs
from scripts.faults.fuzz import targets
from scripts.faults.fuzz.mutate import mutate
from trainer.data.token_file import open_token_file


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[list[str]]:
    before = signal.getsignal(signal.SIGALRM)
    yield ["--engine", "own", "--target", "tokens", "--seconds", "0.5", "--findings", str(tmp_path / "findings")]
    signal.signal(signal.SIGALRM, before)


def test_a_short_run_counts_what_it_tried(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz_inputs.main(["--inside", *arguments]) == 0
    assert int(capsys.readouterr().out.split("executed_units: ")[1].split()[0]) > 10


def test_what_breaks_something_is_kept(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: targets.Inputs, data: bytes) -> None:
        if len(data) < 1024:
            raise IndexError("planted")

    monkeypatch.setattr(targets.Inputs, "_try_tokens", broken)
    with pytest.raises(IndexError, match="planted"):
        fuzz_inputs.main(["--inside", *arguments])
    (finding,) = (tmp_path / "findings").iterdir()
    assert len(finding.read_bytes()) < 1024


def test_another_branch_is_another_edge(tmp_path: Path) -> None:
    def attempt(data: bytes) -> None:
        (tmp_path / "a.bin").write_bytes(data)
        with pytest.raises(TrainerError):
            open_token_file(tmp_path / "a.bin")

    short, magic = fuzz_inputs._edges_of(attempt, bytes(10)), fuzz_inputs._edges_of(attempt, bytes(1024))
    assert short - magic
    assert magic - short
    assert fuzz_inputs._edges_of(attempt, bytes(20)) == short


@pytest.mark.parametrize("data", [b'{"a":[1,{"b":2.5}],"c":null}', b'{"lacks":["its","brace"]', b"\xff\x00", b""])
def test_mutations_follow_the_seed_and_reach_json_and_bytes(data: bytes) -> None:
    changed = [mutate(data, random.Random(seed)) for seed in range(300)]
    assert changed == [mutate(data, random.Random(seed)) for seed in range(300)]
    assert len(set(changed)) > 20
    if data.endswith(b"}"):
        assert sum(_is_json(each) for each in changed) > 50


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
