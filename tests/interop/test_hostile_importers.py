"""Hostile checkpoints of other programs: nothing in a file is run, and each comes in or is refused in one message."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from reprise.errors import TrainerError
from tests.interop.states import opened, read_all, replace_file, state_of
from tests.interop.test_contract import LAYOUTS
from tests.messages import refused
from tests.profiles import TIER, scaled
from trainer.interop.torch_file import read_records, read_torch_file

PICKLED = ("nanogpt", "dcp", "universal", "universal 3", "ranks", "fully", "buckets")
# Functions that make the folder {0} of their arguments, as in a pickle's names, and the arguments.
FUNCTIONS = (
    ("os", "mkdir", "{0}"),
    ("posix", "mkdir", "{0}"),
    ("os", "system", "mkdir {0}"),
    ("subprocess", "getoutput", "mkdir {0}"),
    ("subprocess", "Popen", "['mkdir', '{0}']"),
    ("builtins", "eval", "__import__('os').mkdir('{0}')"),
    ("__builtin__", "exec", "import os; os.mkdir('{0}')"),
    ("pathlib", "Path.mkdir", "{0}"),
    ("pathlib", "PosixPath", "{0}"),
    ("tempfile", "mkdtemp", "{0}"),
    ("shutil", "copytree", "{0}"),
    ("runpy", "run_path", "{0}"),
    ("importlib", "import_module", "antigravity"),
    ("torch", "save", "{0}"),
    ("torch.serialization", "load", "{0}"),
    ("torch.distributed.checkpoint.filesystem", "FileSystem.mkdir", "{0}"),
    ("megatron.core.dist_checkpointing.strategies.torch", "os.mkdir", "{0}"),
    ("argparse", "FileType", "w"),
    ("builtins", "getattr", "{0}"),
    ("_codecs", "encode", "{0}"),
)


def text(value: str) -> bytes:
    """Return the opcode of a string."""
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


# The ways in which pickles call, or set what is called later.
STYLES: dict[str, Callable[[str, str, bytes], bytes]] = {
    "reduced": lambda module, name, argument: named(module, name) + argument + b"\x85R",
    "by text": lambda module, name, argument: text(module) + text(name) + b"\x93" + argument + b"\x85R",
    "instance": lambda module, name, argument: b"(" + argument + f"i{module}\n{name}\n".encode(),
    "object": lambda module, name, argument: b"(" + named(module, name) + argument + b"o",
    "new": lambda module, name, argument: named(module, name) + argument + b"\x85\x81",
    "new by name": lambda module, name, argument: named(module, name) + argument + b"\x85}\x92",
    "attribute": lambda module, name, argument: named("builtins", "getattr") + named(module, name) + text("__call__")
    + b"\x86R" + argument + b"\x85R",
    "state": lambda module, name, argument: named("pathlib", "PosixPath") + b")R}" + text("__setstate__")
    + named(module, name) + b"sb" + argument + b"b",
}  # fmt: skip


def payloads(proof: Path) -> Iterator[bytes]:
    """Yield the opcodes of every call in every way."""
    for write in STYLES.values():
        for module, name, argument in FUNCTIONS:
            yield write(module, name, text(argument.format(proof)))


def pickled(data: bytes, payload: bytes, *, is_beside: bool) -> bytes:
    """Return a pickle with one more entry, or of the payload alone."""
    return data[:-1] + text("a") + payload + b"s." if is_beside else b"\x80\2" + payload + b"."


def archived(data: bytes, payload: bytes, *, is_beside: bool) -> bytes:
    """Return a file of `torch.save` with a payload in it, and right checksums."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, pickled(content, payload, is_beside=is_beside) if name.endswith(".pkl") else content)
    return stream.getvalue()


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder that code in a file would make."""
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)  # other tests make files in the folder of the checkout
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists()
    assert not os.listdir(working)


@pytest.mark.parametrize("reader", ["a file", "metadata"])
def test_no_call_in_a_pickle_is_made(proof: Path, tmp_path: Path, reader: str) -> None:
    stream, file = io.BytesIO(), tmp_path / "file"
    torch.save({"weight": torch.zeros(3)}, stream)
    for payload in payloads(proof):
        for is_beside in (True, False):
            try:
                if reader == "metadata":
                    file.write_bytes(pickled(b"\x80\2}.", payload, is_beside=is_beside))
                    read_records(file)
                else:
                    file.write_bytes(archived(stream.getvalue(), payload, is_beside=is_beside))
                    read_torch_file(file)
            except TrainerError:
                pass
            assert not proof.exists(), payload


def test_packed_members_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\2}.")
    with refused(TrainerError, "archive/data.pkl"):
        read_torch_file(file)


# ---- whole checkpoints


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a layout, and writes it once."""
    root = tmp_path_factory.mktemp("seeds")

    def seed(name: str) -> Path:
        if not (root / name).exists():
            LAYOUTS[name].write(root / name, state_of(LAYOUTS[name].family))
        return root / name

    return seed


def change_value(random: Random, table: Any) -> None:
    """Replace or remove an entry of plain data."""
    table = getattr(table, "__dict__", table)
    keys = list(table) if isinstance(table, dict) else list(range(len(table))) if isinstance(table, list) else []
    if not keys:
        return
    key = random.choice(keys)
    if random.random() < 0.7 and isinstance(getattr(table[key], "__dict__", table[key]), dict | list):
        change_value(random, table[key])
    elif isinstance(table[key], torch.Tensor):
        table[key] = random.choice([table[key].reshape(-1), table[key].double(), torch.tensor(1), None])
    else:
        table[key] = random.choice([0, -1, 7, 2**31, 2**62, None, "", "../../etc", 1.5, float("nan"), [], {}, (), [[]]])


def mutate(random: Random, folder: Path, proof: Path) -> str:
    """Change a file of a folder in one way; return what was done."""
    path = random.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    data = path.read_bytes()
    is_torch, is_pickle = path.suffix == ".pt", path.name == ".metadata"
    change = random.choice(["bytes", "cut", *(["call"] * 3 if is_torch or is_pickle else []), *["value"] * is_torch])
    if change == "call":
        write = archived if is_torch else pickled
        path.write_bytes(
            write(data, random.choice(list(payloads(proof))), is_beside=is_torch and random.random() < 0.5)
        )
    elif change == "value":
        replace_file(path, lambda table: change_value(random, table))
    elif change == "cut":
        path.write_bytes(data[: random.randrange(len(data))])
    else:
        at = random.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :])
    return f"{change} of {path.name}"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_hostile_checkpoints_are_refused_or_read(seeds: Callable[[str], Path], tmp_path: Path, proof: Path) -> None:
    """500 files in `make test-all`."""
    problems = []
    for number in range(5 if TIER == "gate" else scaled(1000)):
        random, folder = Random(f"hostile/{number}"), tmp_path / "case"
        layout = LAYOUTS[name := random.choice(PICKLED)]
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(seeds(name), folder)
        change = mutate(random, folder, proof)
        try:
            read_all(opened(layout.kind, folder, layout.overrides))
        except TrainerError as error:
            problems += [(number, name, change, "a long message")] if len(str(error)) > 64 << 10 else []
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the case is about
            problems.append((number, name, change, repr(error)[:300]))
        assert not proof.exists(), (number, name, change)
    assert problems == []


@pytest.mark.parametrize("name", PICKLED[:6])
def test_a_pickle_is_not_opened_unless_it_is_trusted(seeds: Callable[[str], Path], name: str) -> None:
    with refused(TrainerError, "--trust-pickle"):
        opened(LAYOUTS[name].kind, seeds(name), LAYOUTS[name].overrides, trusts_pickle=False)
