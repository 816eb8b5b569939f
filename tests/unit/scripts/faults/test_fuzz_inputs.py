"""The fuzzer tries inputs that lead further, and keeps what breaks something."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.faults import fuzz_inputs
from scripts.faults.fuzz import targets
from scripts.faults.fuzz.mutate import mutate


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[list[str]]:
    before = signal.getsignal(signal.SIGALRM)
    yield ["--target", "tokens", "--seconds", "0.5", "--findings", str(tmp_path / "findings")]
    signal.signal(signal.SIGALRM, before)


def test_what_breaks_something_is_kept(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: targets.Inputs, data: bytes) -> None:
        if len(data) < 1024:
            raise IndexError("planted")

    monkeypatch.setattr(targets.Inputs, "_try_tokens", broken)
    with pytest.raises(IndexError, match="planted"):
        fuzz_inputs.main(arguments)
    (finding,) = (tmp_path / "findings").iterdir()
    assert len(finding.read_bytes()) < 1024


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
