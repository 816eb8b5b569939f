"""A load changes all of the live state or nothing: damage, failing reads and interrupts in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from reprise import CheckpointError, PartialLoadError, load_state_dict, save_state_dict
from reprise.format.manifest import BLOCK_BYTES
from reprise.loading.blocks import blocks_of
from reprise.loading.choose import LoadSource
from reprise.loading.reader import open_checkpoint, read_places
from reprise.loading.restorer import Restorer
from reprise.ranks.channel import StoreChannel
from reprise.storage import patience
from reprise.storage.files import FILE_SYSTEM, Files
from tests.fakes import SHARDINGS, CountedReads, all_ranks, flip_bit, sample_specs, sample_state, save_sample

LARGE = BLOCK_BYTES // 4 + 3  # elements of float32: two blocks

State = dict[str, Any]


class Position:
    """An object with a state of its own."""

    def __init__(self, value: float) -> None:
        self.state: State = {"at": [value], "mean": torch.full((2,), value)}

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state


def made(value: float, *, size: int = 3) -> State:
    """Return a state whose tensors are plain, stand for views of another form, or belong to an object."""
    return {
        "model": {"a": torch.full((size,), value), "b": torch.full((2, 2), value)},
        "conjugate": torch.full((2,), complex(value, value)).conj(),
        "expanded": torch.full((1,), value).expand(3),
        "object": Position(value),
        "epoch": value,
        "names": [value, "x"],
    }


def text_of(state: State) -> str:
    """Return all of a state as text, and digests of the large tensors."""
    model = {name: xxhash.xxh3_64_hexdigest(tensor.numpy()) for name, tensor in state["model"].items()}
    return repr({**state, "model": model, "object": state["object"].state})


def flips(path: Path) -> Iterator[Path]:
    """Flip one byte in each block of each tensor in turn, yield its file, and put it back."""
    checkpoint = open_checkpoint(path, FILE_SYSTEM)
    blocks = list(blocks_of(checkpoint, {name: checkpoint.held(name) for name in read_places(checkpoint)}))
    for block in blocks:
        at = block.place.offset + next(block.packed.spans(block.lo, block.hi))[0]
        flip_bit(path / block.place.file, at)
        yield path / block.place.file
        flip_bit(path / block.place.file, at)


def test_damage_in_any_block_changes_nothing(tmp_path: Path) -> None:
    path = save_state_dict(tmp_path, made(2.0, size=LARGE), iteration=1)
    target = made(1.0, size=LARGE)
    before, count = text_of(target), 0
    for file in flips(path):
        with pytest.raises(CheckpointError, match=file.name):
            load_state_dict(path, target)
        assert text_of(target) == before
        count += 1
    assert count == 6
    load_state_dict(path, target)
    assert text_of(target) == text_of(made(2.0, size=LARGE))


def test_an_older_checkpoint_leaves_no_trace_of_a_damaged_one(tmp_path: Path) -> None:
    older = made(2.0)
    for key in ("conjugate", "expanded", "object"):
        del older[key]
    del older["model"]["b"]
    save_state_dict(tmp_path, older, iteration=1)
    path = save_state_dict(tmp_path, made(3.0), iteration=2)
    for _ in flips(path):
        target, expected = made(1.0), made(1.0)
        expected["model"]["a"] = torch.full((3,), 2.0)
        expected |= {"epoch": 2.0, "names": [2.0, "x"]}
        assert load_state_dict(tmp_path, target, strict=False)["iteration"] == 1
        assert text_of(target) == text_of(expected)


SPECS, (ONE, _, _, ROWS, *_) = sample_specs(), SHARDINGS


@pytest.mark.parametrize("has_older", [False, True])
def test_damage_on_one_rank_changes_no_rank(tmp_path: Path, has_older: bool) -> None:
    old, live = (sample_state(SPECS, seed=seed) for seed in (1, 3))
    if has_older:
        save_sample(tmp_path, iteration=1, seed=1)
    path = save_sample(tmp_path, iteration=2, seed=2)

    def call(channel: StoreChannel) -> list[str]:
        tensors = ROWS.live(channel.rank, SPECS, live)
        restorer = Restorer(channel, nonce="n")
        try:
            restorer.restore(LoadSource(tmp_path), check=lambda _: None, live=lambda _: tensors)
        except CheckpointError:
            assert not has_older
        expected = ROWS.live(channel.rank, SPECS, old if has_older else live)
        pairs = zip(tensors, expected, strict=True)
        return [found.spec.name for found, other in pairs if not found.local.equal(other.local)]

    for _ in flips(path):
        assert all_ranks(2, call) == [[], []]


def restore(path: Path, files: Files, *, is_new: bool = False) -> None:
    """Load the sample tensors on a single rank."""
    live = ONE.live(0, SPECS, sample_state(SPECS, seed=2))

    def call(channel: StoreChannel) -> None:
        restorer = Restorer(channel, nonce="n", files=files)
        restorer.restore(LoadSource(path), check=lambda _: None, live=lambda _: live, is_new=is_new)

    all_ranks(1, call)


def test_tensors_that_nobody_has_seen_are_read_once(tmp_path: Path) -> None:
    path = save_sample(tmp_path)
    once, twice = CountedReads(), CountedReads()
    restore(path, once, is_new=True)
    restore(path, twice)
    assert twice.read_bytes - once.read_bytes == sum(spec.total_bytes for spec in SPECS)


def test_a_read_that_fails_after_the_first_change_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_S", 0.0)
    path, complete = save_sample(tmp_path), CountedReads()
    restore(path, complete)
    with pytest.raises(PartialLoadError, match="it failed") as caught:
        restore(path, CountedReads(fails_after=complete.read_bytes - 1))
    assert not isinstance(caught.value, CheckpointError)
