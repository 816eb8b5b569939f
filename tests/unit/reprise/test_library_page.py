"""Sentences of docs/library.md that no test of a module shows."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

from reprise import AsyncSaver, load_state_dict, save, save_state_dict
from reprise.ranks.group import CALL_TIMEOUT_S, COMMIT_TIMEOUT_S
from reprise.saving import plan
from reprise.saving.checkpointer import LINGER_S
from reprise.saving.plan import Chunk
from reprise.saving.snapshot import Snapshot
from reprise.tensors.memory import Bytes
from tests import ROOT

PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_given", [False, True])
def test_a_dict_from_before_a_forward_pass_needs_the_model(tmp_path: Path, is_given: bool) -> None:
    source, model = (fully_shard(nn.Linear(2, 2)) for _ in range(2))
    save_state_dict(tmp_path, {"model": get_model_state_dict(source)}, iteration=1)
    state = {"model": get_model_state_dict(model)}
    with torch.no_grad():
        model(torch.ones(2))
        load_state_dict(tmp_path, state, model=model if is_given else None)
        assert torch.equal(model(torch.ones(2)), source(torch.ones(2))) == is_given


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_threads_copy_as_torch_computes_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    gather, threads, barrier = Snapshot._gather, set(), threading.Barrier(count, timeout=60)

    def gather_together(snapshot: Snapshot, chunk: Chunk, target: Bytes) -> torch.Event | None:
        barrier.wait()
        threads.add(threading.get_ident())
        return gather(snapshot, chunk, target)

    monkeypatch.setattr("torch.get_num_threads", lambda: count)
    monkeypatch.setattr(plan, "CHUNK_BYTES", 1 << 12)
    state = {"w": torch.ones(9 << 10)}  # nine chunks
    with AsyncSaver(tmp_path) as saver:
        saver.save_state_dict(1, state)
        saver.wait()
        monkeypatch.setattr(Snapshot, "_gather", gather_together)
        saver.save_state_dict(2, state)
    assert len(threads) == count


@pytest.mark.parametrize("given", [defaultdict(int), defaultdict(int, a=0)], ids=["empty", "filled"])
def test_a_dict_of_another_class_keeps_that_of_the_load(tmp_path: Path, given: defaultdict[str, int]) -> None:
    save(tmp_path, nn.Linear(1, 1), state={"counts": given}, iteration=1)
    save_state_dict(tmp_path, {"counts": given}, iteration=2)
    save_state_dict(tmp_path, {"counts": {"a": 1}}, iteration=3)
    load_state_dict(tmp_path, {"counts": given})
    assert given == {"a": 1}
    assert given["b"] == 0


def test_an_empty_dict_of_another_class_gives_way_to_a_number(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {"counts": 1}, iteration=1)
    state: dict[str, object] = {"counts": defaultdict(int)}
    load_state_dict(tmp_path, state)
    assert state == {"counts": 1}


def test_the_limits_are_those_of_the_page() -> None:
    page = re.sub(r"\s+", " ", PAGE)
    assert f"seconds ({CALL_TIMEOUT_S:.0f} by default)" in page
    assert f"({COMMIT_TIMEOUT_S:,.0f} s by default)".replace("(", "") in page
    assert f"at most {LINGER_S:.0f} s" in page
