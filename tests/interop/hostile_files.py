"""Damages and rewrites the files of other programs' checkpoints, as accidents and attackers do.

`mutate` changes a folder in one way, which a seeded random generator chooses.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch

NUMBERS = (0, -1, 1, 7, 255, 10**9, 2**31, 2**62, 2**63, 10**30, 10**300)
VALUES: tuple[Any, ...] = (*NUMBERS, None, True, "", "x", 1.5, float("nan"), float("inf"), [], {}, (), [[]])
TEXTS = ("../../etc/passwd", "a" * 100_000, "\0", "", "-1", "9" * 5000, "release", "\uff13", "1e3", "3\n3")


# ---- pickles, opcode by opcode


def text(value: str) -> bytes:
    """Return the opcode of a string."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def call(module: str, name: str, *arguments: bytes) -> bytes:
    """Return the opcodes that call a function."""
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def number(value: int) -> bytes:
    """Return the opcode of a large integer."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def nested(levels: int) -> bytes:
    """Return the opcodes of a tuple that holds one tuple twice, and so on: 2 ** `levels` values when it is written."""
    places = (struct.pack("<I", 5000 + n) for n in range(levels))
    return b")" + b"".join(b"r" + place + b"j" + place + b"\x86" for place in places)


# Values that ask for memory, by name; those that call are in the tests of the contract.
PAYLOADS: Mapping[str, bytes] = {
    "bytearray": call("builtins", "bytearray", number(3 << 30)),
    "text": b"\x8d" + struct.pack("<Q", 1 << 40),
    "frame": b"\x95" + struct.pack("<Q", 1 << 40) + b"N",
    "digits": b"I" + b"9" * 100_000 + b"\n",
    "memos": b"N" + b"".join(b"r" + struct.pack("<I", n * 65537 % 2**32) for n in range(200_000)),
    "deep lists": b"]" * 100_000 + b"a" * 99_999,
    "marks": b"(" * 3_000_000,
    "tuple of 2 ** 28": nested(28),
    "key of 2 ** 40": b"}" + nested(40) + b"Ns",
    "empty": b"",
}


def with_value(data: bytes, key: str, payload: bytes) -> bytes:
    """Return a pickle of a dictionary with one more entry."""
    return data[:-1] + text(key) + payload + b"s."


def rewrite_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return an archive of torch with another pickle and right checksums, or another pickle if the data is one."""
    if data[:2] != b"PK":
        return change(data)
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(old.read(name)) if name.endswith("data.pkl") else old.read(name))
    return stream.getvalue()


def bomb(data: bytes, total_bytes: int) -> bytes:
    """Return an archive whose pickle unpacks to zeros."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for name in old.namelist():
            new.writestr(name, bytes(total_bytes) if name.endswith("data.pkl") else old.read(name))
    return stream.getvalue()


# ---- values


def _leaves(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield the table of every value in plain data, and its key there."""
    if isinstance(value, argparse.Namespace) or type(value).__module__.startswith("torch.distributed.checkpoint"):
        value = getattr(value, "__dict__", {})
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        if depth < 8:
            yield from _leaves(inner, depth + 1)


def change_value(random: Random, value: Any) -> None:
    """Replace or remove an entry of plain data."""
    table, key = random.choice(list(_leaves(value)) or [({"": 0}, "")])
    old = table[key]
    if random.random() < 0.15 and isinstance(table, dict):
        del table[key]
    elif isinstance(old, torch.Tensor):
        table[key] = random.choice([old.reshape(-1), old.double(), torch.tensor(1), old.to_sparse(), None])
    elif isinstance(old, tuple) and old and random.random() < 0.7:
        sizes = list(old)
        sizes[random.randrange(len(sizes))] = random.choice([0, 1, 2**31, 2**40, 2**61])
        table[key] = type(old)(sizes)
    elif isinstance(old, str | int) and random.random() < 0.7:
        table[key] = random.choice(NUMBERS if isinstance(old, int) else (*TEXTS, old + "x"))
    else:
        table[key] = random.choice(VALUES)


# ---- files of a folder


def has_pickle(path: Path) -> bool:
    return path.name == ".metadata" or path.suffix == ".pt"


def _bytes(random: Random, path: Path) -> None:
    """Flip bits, cut, overwrite or insert bytes."""
    data = bytearray(path.read_bytes() or b"\0")
    at = random.randrange(len(data))
    match random.randrange(4):
        case 0:
            for _ in range(random.choice((1, 1, 2, 8))):
                data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        case 1:
            del data[at : random.choice((at + 1, at + 8, at + 1000, len(data)))]
        case 2:
            data[at : at + random.choice((0, 64))] = random.randbytes(64)
        case 3:
            data[at : at + 8] = random.choice((b"\xff" * 8, bytes(8), struct.pack("<q", 1 << 40)))
    path.write_bytes(data)


def _in_pickle(random: Random, path: Path) -> None:
    """Flip and change bytes of a pickle, with right checksums around it."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(random.choice((1, 1, 2, 4))):
            at = random.randrange(len(changed))
            numbers = [n for n, code in enumerate(changed[:-4]) if code in b"JKM\x8a"]
            if numbers and random.random() < 0.4:
                at = random.choice(numbers) + 1
                changed[at : at + 4] = random.choice((b"\xff\xff\xff\x7f", b"\0\xca\x9a\x3b", b"\xff" * 4))
            elif random.random() < 0.3:
                changed[at:at] = bytes([random.choice(b"()]}Nqrhj02ocRbus\x81\x85\x86\x8a\x8b\x8d\x95\x96")])
            else:
                changed[at] ^= 1 << random.randrange(8)
        return bytes(changed)

    path.write_bytes(rewrite_pickle(path.read_bytes(), change))


def _payload(random: Random, path: Path) -> None:
    """Put a hostile value into a pickle, in place of it or beside its entries."""
    payload = PAYLOADS[random.choice(sorted(PAYLOADS))]
    key = random.choice(["args", "iteration", "optimizer", "model", "extra", "module", "ds_version", "step", "state"])
    is_beside = random.random() < 0.5 and path.name != ".metadata"
    path.write_bytes(
        rewrite_pickle(
            path.read_bytes(), lambda data: with_value(data, key, payload) if is_beside else b"\x80\2" + payload + b"."
        )
    )


def _values(random: Random, path: Path) -> None:
    """Change values of a file, with the rest of it as it should be."""
    is_metadata, data = path.name == ".metadata", path.read_bytes()
    with warnings.catch_warnings(), contextlib.suppress(AttributeError, ImportError, RuntimeError, TypeError):
        warnings.simplefilter("ignore")
        value = pickle.loads(data) if is_metadata else torch.load(path, weights_only=False)  # noqa: S301 - our own
        for _ in range(random.choice((1, 1, 2, 4))):
            change_value(random, value)
        stream = io.BytesIO()
        (pickle.dump if is_metadata else torch.save)(value, stream)
        data = stream.getvalue()
    path.write_bytes(data)


def _text(random: Random, path: Path) -> None:
    """Put another name into a tracker."""
    path.write_text(random.choice(TEXTS))


def _name(random: Random, path: Path) -> None:
    """Remove a file, or put a folder or a pipe in its place."""
    path.unlink()
    random.choice((Path.mkdir, os.mkfifo, Path.touch, lambda _: None))(path)


def mutate(random: Random, folder: Path) -> str:
    """Change a file of a folder in one way; return what was done."""
    path = random.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    changes = [_bytes, _name]
    if has_pickle(path):
        changes += [_in_pickle, _payload, _payload, _values, _values]
    elif path.name in ("latest", "latest_checkpointed_iteration.txt"):
        changes += [_text, _text]
    change = random.choice(changes)
    change(random, path)
    return f"{change.__name__} of {path.name}"
