"""Checkpoints and token files of strangers: a `TrainerError`, in bounded time and memory, and no file of others opened.

All digests match, as those of an attacker would.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise import load
from reprise.errors import TrainerError
from reprise.format import INDEX, MANIFEST, STATE
from reprise.format.manifest import FileEntry, digest_of
from reprise.storage import json_file
from tests.crash.hostile_inputs import MODEL, OPTIMIZER, Inputs, Opened, seal
from tests.crash.mutate import mutate
from tests.profiles import examples
from trainer.data.token_file import open_token_file

MOST_MEMORY = 64 << 20
MOST_SECONDS = 30
FILES = (MANIFEST, STATE, INDEX, MODEL, OPTIMIZER)
JSON_FILES = ("manifest", "state", "header", "optimizer_header", "trainer_state")
TARGETS = (*JSON_FILES, "tokens")


class Hostile(Inputs):
    """Inputs that must be refused, in bounded time and memory and without a look at a file elsewhere."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # All modules are imported by that, before it is watched what is opened.
        assert all(self.attempt(target, data) for target, data in self.seeds.items())
        self.opened = Opened(folder)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Fail what opens a file elsewhere."""
        self.opened.outside.clear()
        self.opened.watching = True
        try:
            yield
        finally:
            self.opened.watching = False
        assert self.opened.outside == []

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Fail what takes too long or too much memory, too."""

        def late(*_: object) -> None:
            raise TimeoutError(f"it took more than {MOST_SECONDS} s")

        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(MOST_SECONDS)
        tracemalloc.start()
        try:
            with self.watched():
                yield
            assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
        finally:
            tracemalloc.stop()
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    def refuse(self, target: str, data: bytes) -> None:
        """Require that a file of this content is refused."""
        with self.bounded():
            assert not self.attempt(target, data)

    def refused(self) -> str:
        """Load the checkpoint as it lies, which must be refused; return the message."""
        with self.bounded(), pytest.raises(TrainerError) as caught:
            self.load()
        assert len(str(caught.value)) < 20_000
        return str(caught.value)


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    return Hostile(Path(os.path.realpath(tmp_path_factory.mktemp("hostile"))))


@pytest.fixture
def inputs(tried: Hostile) -> Iterator[Hostile]:
    tried.restore()
    yield tried
    tried.restore()


MEMBERS = {
    "NaN": b'"x":NaN',
    "infinity": b'"x":-Infinity',
    "a number beyond a float": b'"x":1e999',
    "a number of many digits": b'"x":' + b"9" * 5000,
    "a key twice": b'"x":1,"x":1',
    "a key twice, deep inside": b'"x":{"y":{"z":1,"z":2}}',
    "lists as deep as the stack": b'"x":' + b"[" * 100_000 + b"]" * 100_000,
    "lists as deep as nearly the stack": b'"x":' + b"[" * 700 + b"]" * 700,
    "objects just too deep": b'"x":' + b'{"y":' * 64 + b"1" + b"}" * 64,
    "half a surrogate pair": rb'"\ud800":1',
    "half a surrogate pair as a value": rb'"x":["\udfff"]',
    "no UTF-8": b'"x":"\xff"',
    "a comma too many": b'"x":1,',
}


@pytest.mark.parametrize("target", JSON_FILES)
@pytest.mark.parametrize("member", MEMBERS.values(), ids=[name.replace(" ", "-") for name in MEMBERS])
def test_what_is_no_standard_json_is_refused_in_every_file(inputs: Hostile, target: str, member: bytes) -> None:
    good = inputs.seeds[target]
    inputs.refuse(target, b"{" + member + b"," + good.lstrip()[1:])
    assert inputs.attempt(target, good)


PATHS = (
    "../secret",
    "../../secret",
    "/etc/passwd",
    "optimizer/../../secret",
    "./secret",
    "optimizer//secret",
    "..",
    "",
    "a\0b",
    "x" * 5000,
    "a/" * 100_000 + "b",
)


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
@pytest.mark.parametrize("is_tensor_file", [True, False])
def test_a_path_that_leaves_the_folder_is_refused_and_not_opened(
    inputs: Hostile, path: str, is_tensor_file: bool
) -> None:
    (inputs.checkpoint.parent / "secret").write_bytes(b"secret")
    inputs.seal_file(path, FileEntry(6, digest_of(b"secret"), is_tensor_file))
    inputs.refused()


@pytest.mark.parametrize("name", [*FILES, "optimizer"])
def test_a_link_out_of_the_folder_is_refused_and_not_followed(inputs: Hostile, tmp_path: Path, name: str) -> None:
    path = inputs.checkpoint / name
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    inputs.refused()


def test_an_iteration_that_is_a_link_out_of_the_run_is_none(inputs: Hostile, tmp_path: Path) -> None:
    shutil.move(inputs.checkpoint, tmp_path / "elsewhere")
    inputs.checkpoint.symlink_to(tmp_path / "elsewhere")
    with inputs.bounded(), pytest.raises(TrainerError, match="is not a folder"):
        load(inputs.checkpoint.parent, inputs.fresh()[0])
    inputs.checkpoint.unlink()


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(inputs: Hostile, name: str) -> None:
    (inputs.checkpoint / name).unlink()
    os.mkfifo(inputs.checkpoint / name)
    assert "regular file" in inputs.refused()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [1 << 40, json_file.MAX_BYTES + 1])
def test_a_file_as_large_as_it_says_is_not_read_into_memory(inputs: Hostile, name: str, size: int) -> None:
    if name != MANIFEST:
        entry = inputs.good_manifest.files[name]
        inputs.seal_file(name, replace(entry, total_bytes=size))
    os.truncate(inputs.checkpoint / name, size)
    inputs.refused()


def test_a_header_of_a_declared_size_beyond_any_is_not_read(inputs: Hostile) -> None:
    path = inputs.checkpoint / MODEL
    entry = inputs.good_manifest.files[MODEL]
    for length in (1 << 63, (100 << 20) + 1, entry.total_bytes - 7):
        with path.open("r+b") as file:
            file.write(length.to_bytes(8, "little"))
        assert f"a length of {length} B" in inputs.refused()
    os.truncate(path, 1 << 40)
    inputs.seal_file(MODEL, replace(entry, total_bytes=1 << 40))
    with path.open("r+b") as file:
        file.write((1 << 39).to_bytes(8, "little"))
    assert "a length of" in inputs.refused()


# Changes of the manifest: members of the entry of one tensor, of shape [3, 4], of a file, or of the whole.
D = "00" * 8
WEIGHT: dict[str, str] = {
    "no piece": '"cuts":[[0],[0]], "digests":""',
    "missing rows": '"cuts":[[0,2],[0,4]]',
    "rows beyond the end": '"cuts":[[0,4],[0,4]]',
    "rows twice": f'"cuts":[[0,2,1,3],[0,4]], "digests":"{D * 3}"',
    "the same cut twice": f'"cuts":[[0,3,3],[0,4]], "digests":"{D * 2}"',
    "overlapping shares": f'"shares":{{"0":[24,12]}}, "digests":"{D * 3}"',
    "a share beyond the end": f'"shares":{{"0":[64]}}, "digests":"{D * 2}"',
    "shares of another cell": f'"shares":{{"1":[12]}}, "digests":"{D * 2}"',
    "shares of a cell by two names": f'"shares":{{"0":[12],"00":[24]}}, "digests":"{D * 2}"',
    "too few digests": '"digests":""',
    "too many digests": f'"digests":"{D * 2}"',
    "another view": '"view":[2,5], "cuts":[[0,2],[0,5]]',
    "a view of countless elements": f'"view":[{1 << 62},{1 << 62}], "cuts":[[0,{1 << 62}],[0,{1 << 62}]]',
    "a view of countless dimensions": f'"view":{[1] * 20_000}, "cuts":{[[0, 1]] * 20_000}',
    "countless cells": f'"view":{[99] * 9}, "cuts":{[list(range(100))] * 9}',
}
PIECES: dict[str, Callable[[dict[str, Any]], object]] = {
    "missing tensor": lambda table: table["tensors"].pop("weight"),
    "a size below zero": lambda table: table["files"][MODEL].update(bytes=-1),
    "a size of two to the power of 64": lambda table: table["files"][MODEL].update(bytes=1 << 64),
    "no files": lambda table: table.update(files={}),
    "files in a list": lambda table: table.update(files=[]),
    "a state file with tensors": lambda table: table["files"].update({STATE: table["files"][MODEL]}),
    "aliases in a number": lambda table: table.update(aliases=1),
    "a format of another kind": lambda table: table.update(format=[["reprise-manifest/1"]] * 10_000),
}


@pytest.mark.parametrize("name", [*WEIGHT, *PIECES])
def test_pieces_that_are_not_the_tensors_are_refused(inputs: Hostile, name: str) -> None:
    table = json.loads(inputs.seeds["manifest"] + b"}")
    if name in WEIGHT:
        table["tensors"]["weight"] |= json.loads(f"{{{WEIGHT[name]}}}")
    else:
        PIECES[name](table)
    inputs.write(MANIFEST, seal(json.dumps(table).encode()[:-1]))
    inputs.refused()


ENTRIES = {
    "overlapping": '"F32", "shape": [3,4], "data_offsets": [12,60]',
    "far away": f'"F32", "shape": [3,4], "data_offsets": [{1 << 60},{(1 << 60) + 48}]',
    "countless": f'"F32", "shape": [{1 << 62},{1 << 62}], "data_offsets": [0,48]',
    "dimensions": f'"F32", "shape": {[1] * 100_000}, "data_offsets": [0,4]',
    "digits": f'"F32", "shape": [{",".join(["9" * 4000] * 300)}], "data_offsets": [0,48]',
    "empty": f'"F32", "shape": [0,{10**400}], "data_offsets": [60,60]',
    "lists": '[[["F32"]]], "shape": [3,4], "data_offsets": [0,48]',
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_header_that_does_not_describe_its_file_is_refused(inputs: Hostile, name: str) -> None:
    good = inputs.seeds["header"].decode().rstrip()
    entry = f'{{"dtype": {ENTRIES[name]}}}'
    assert '"weight":' in good
    inputs.refuse("header", f'{good[:-1]},"ghost":{entry}}}'.encode())
    inputs.refuse("header", re.sub(r'"weight":\{[^}]*\}', lambda _: f'"weight":{entry}', good).encode())


MEMBERS_OF_STATE = (
    '"iteration":null',
    '"iteration":true',
    '"iteration":-1',
    f'"iteration":{1 << 63}',
    '"iteration":"4"',
    '"format":{"a":[1,1,1]}',
    '"user":[1]',
    '"groups":{"names":[]}',
    '"groups":[{"names":"weight","numbers":{}}]',
    '"groups":[{"names":[["weight"]],"numbers":{}}]',
    '"groups":[{"names":["weight"],"numbers":[]}]',
    '"groups":[{"names":["weight"]}]',
    '"optimizer":"SGD"',
    '"optimizer":{"name":["AdamW"]}',
)


@pytest.mark.parametrize("members", MEMBERS_OF_STATE)
def test_members_of_another_kind_are_refused_by_the_library(inputs: Hostile, members: str) -> None:
    state = json.loads(inputs.seeds["state"]) | json.loads(f"{{{members}}}")
    inputs.refuse("state", json.dumps(state).encode())


@pytest.mark.parametrize("target", TARGETS)
@examples(60)
@given(chance=st.randoms(use_true_random=False))
def test_no_change_of_a_file_raises_anything_else(tried: Hostile, target: str, chance: random.Random) -> None:
    changed = mutate(tried.seeds[target], chance)  # the draw may read sources of modules, for constants in them
    with tried.watched():
        tried.attempt(target, changed)


def test_a_pipe_in_place_of_tokens_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bin")
    with pytest.raises(TrainerError, match="not a regular file"):
        open_token_file(tmp_path / "pipe.bin")


def test_a_huge_token_file_is_not_read_into_memory(inputs: Hostile) -> None:
    os.truncate(inputs.tokens, 1 << 40)
    with inputs.bounded(), pytest.raises(TrainerError, match="another size than its header"):
        open_token_file(inputs.tokens)
