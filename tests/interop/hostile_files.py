"""Damages and rewrites the files of other programs' checkpoints, as accidents and attackers do.

`mutate` changes a folder in one way, which a seeded random generator chooses. A payload of a pickle that runs would
write the file `canary`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch

PICKLES = (".pt",)
NUMBERS = (0, -1, 1, 2, 7, 255, 10**9, 2**31, 2**62, 2**63, 2**64, 10**30, 10**300)
VALUES: tuple[Any, ...] = (*NUMBERS, None, True, "", "x", 1.5, float("nan"), float("inf"), -1e308, [], {}, (), [[]])
TOKENS = (
    "release",
    "-1",
    "0",
    "",
    "3\n3",
    "999999999999999999999",
    "9" * 5000,
    "../..",
    "\0",
    "\uff13",
    "latest",
    "1e3",
    ".",
)


# ---- pickles, opcode by opcode


def text(value: str) -> bytes:
    """Return the opcode of a string."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def call(module: str, name: str, *arguments: bytes) -> bytes:
    """Return the opcodes that call a function."""
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def number(value: int) -> bytes:
    """Return the opcode of an integer of any size."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))) + data


def nested(levels: int) -> bytes:
    """Return the opcodes of a tuple that holds one tuple twice, and so on: 2 ** `levels` values when it is written."""
    return b")" + b"".join(
        b"r" + struct.pack("<I", 5000 + n) + b"j" + struct.pack("<I", 5000 + n) + b"\x86" for n in range(levels)
    )


def shared_lists(levels: int) -> bytes:
    """Return the opcodes of a dictionary that holds one dictionary twice, and so on."""
    found = b"}"
    for level in range(levels):
        place = struct.pack("<I", 7000 + level)
        found += b"r" + place + b"0}(" + text("a") + b"j" + place + text("b") + b"j" + place + b"u"
    return found


def payloads(canary: Path) -> dict[str, Callable[[], bytes]]:
    """Return the opcodes of hostile values, by name."""
    touch = f"touch {canary}"
    return {
        "system": lambda: call("os", "system", text(touch)),
        "posix": lambda: call("posix", "system", text(touch)),
        "exec": lambda: call("builtins", "exec", text(f"open({str(canary)!r}, 'w')")),
        "eval": lambda: call("__builtin__", "eval", text(f"open({str(canary)!r}, 'w')")),
        "open": lambda: call("io", "open", text(str(canary)), text("w")),
        "touch": lambda: call("pathlib", "Path.touch", call("pathlib", "Path", text(str(canary)))),
        "popen": lambda: call("subprocess", "Popen", text(touch)),
        "inst": lambda: b"(" + text(touch) + b"ios\nsystem\n",
        "newobj": lambda: b"csubprocess\nPopen\n" + text(touch) + b"\x85\x81",
        "newobj_ex": lambda: b"csubprocess\nPopen\n)}" + text("args") + text(touch) + b"s\x92",
        "stack_global": lambda: text("os") + text("system") + b"\x93" + text(touch) + b"\x85R",
        "load": lambda: call("torch", "load", text(str(canary))),
        "getattr": lambda: call("builtins", "getattr", b"cos\nsystem\n", text("__call__")),
        "build class": lambda: b"ccollections\nOrderedDict\n}" + text("items") + number(1) + b"sb",
        "build tensor": lambda: call("torch", "Tensor") + number(1) + b"b",
        "build dictionary": lambda: b"ccollections\nOrderedDict\n)R}" + text("items") + number(1) + b"sb",
        "bytearray": lambda: call("builtins", "bytearray", number(3 << 30)),
        "tensor": lambda: call("torch", "Tensor", number(1 << 31)),
        "storage": lambda: call("torch", "FloatStorage", number(1 << 31)),
        "zeros": lambda: call("torch._utils", "_rebuild_qtensor", *[number(1 << 20)] * 5),
        "range": lambda: call("builtins", "list", call("builtins", "range", number(1 << 40))),
        "text": lambda: b"\x8d" + struct.pack("<Q", 1 << 40),
        "bytes": lambda: b"\x8e" + struct.pack("<Q", 1 << 33),
        "bytearray8": lambda: b"\x96" + struct.pack("<Q", 1 << 33),
        "frame": lambda: b"\x95" + struct.pack("<Q", 1 << 40) + b"N",
        "long4": lambda: b"\x8b" + struct.pack("<i", 1 << 30) + b"\1" * 1000,
        "number": lambda: number(1 << (8 * 100_000)),
        "digits": lambda: b"I" + b"9" * 100_000 + b"\n",
        "memo": lambda: b"Nr" + b"\xff" * 4,
        "memos": lambda: b"N" + b"".join(b"r" + struct.pack("<I", n * 65537 % 2**32) for n in range(200_000)),
        "deep lists": lambda: b"]" * 100_000 + b"a" * 99_999,
        "deep tuples": lambda: b")" + b"\x85" * 100_000,
        "deep key": lambda: b"}" + b")" + b"\x85" * 100_000 + b"Ns",
        "marks": lambda: b"(" * 3_000_000,
        "lists": lambda: b"(" + b"]" * 5_000_000 + b"l",
        "sets": lambda: b"(" + b"\x8f" * 3_000_000 + b"l",
        "tuple of 2 ** 28": lambda: nested(28),
        "key of 2 ** 40": lambda: b"}" + nested(40) + b"Ns",
        "member of 2 ** 40": lambda: b"\x8f(" + nested(40) + b"\x90",
        "tables of 2 ** 28": lambda: shared_lists(28),
        "in itself": lambda: b"}r" + struct.pack("<I", 9000) + text("a") + b"j" + struct.pack("<I", 9000) + b"s",
        "extension": lambda: b"\x82\x01",
        "persistent": lambda: text("storage") + b"Q",
        "empty": lambda: b"",
    }


def with_value(data: bytes, key: str, payload: bytes) -> bytes:
    """Return a pickle of a dictionary with one more entry."""
    return data[:-1] + text(key) + payload + b"s."


# ---- zip archives


def members_of(data: bytes) -> dict[str, bytes]:
    """Return the members of an archive, by name."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_of(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive of members, with right checksums."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


def rewrite_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return an archive of torch with another pickle, or another pickle if the data is one."""
    if data[:2] != b"PK":
        return change(data)
    members = members_of(data)
    name = next(name for name in members if name.endswith("data.pkl"))
    return archive_of({**members, name: change(members[name])})


def bomb(data: bytes, member: str, total_bytes: int) -> bytes:
    """Return an archive with a member that unpacks to zeros."""
    members, stream = members_of(data), io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            if not name.endswith(member):
                archive.writestr(name, content)
                continue
            with archive.open(name, "w", force_zip64=True) as part:
                for _ in range(total_bytes >> 20):
                    part.write(bytes(1 << 20))
    return stream.getvalue()


# ---- values


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield every holder of a value in plain data, and its key there."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, argparse.Namespace):
        items = list(vars(value).items())
    elif isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    elif type(value).__module__.startswith("torch.distributed.checkpoint"):
        items = list(vars(value).items())
    for key, inner in items:
        yield value, key
        if len(path) < 8:
            yield from _leaves(inner, (*path, key))


def change_value(random: Random, value: Any) -> None:
    """Replace, remove or exchange an entry of plain data."""
    leaves = list(_leaves(value))
    if not leaves:
        return
    holder, key = random.choice(leaves)
    table = vars(holder) if not isinstance(holder, dict | list) else holder
    kind = random.random()
    if kind < 0.15 and not isinstance(table, list):
        del table[key]
    elif kind < 0.3:
        other, name = random.choice(leaves)
        table[key] = getattr(other, name, None) if not isinstance(other, dict | list) else other[name]
    elif kind < 0.4 and isinstance(table.get(key) if isinstance(table, dict) else None, torch.Tensor):
        table[key] = random.choice(
            [table[key].reshape(-1), table[key].double(), torch.tensor(1), table[key].to_sparse()]
        )
    else:
        table[key] = _hostile(random, table[key])


def _hostile(random: Random, value: Any) -> Any:
    """Return a value in place of another, preferably of its type."""
    if isinstance(value, torch.Size | tuple) and value and random.random() < 0.7:
        sizes = list(value)
        sizes[random.randrange(len(sizes))] = random.choice([0, 1, 2**31, 2**40, 2**61])
        return type(value)(sizes)
    if type(value) is int and random.random() < 0.7:
        return random.choice(NUMBERS)
    if isinstance(value, str) and random.random() < 0.7:
        return random.choice(["../../etc/passwd", "/etc/passwd", "a" * 100_000, "\0", "", value + "x", value[:-1]])
    return random.choice(VALUES)


def change_saved(random: Random, path: Path) -> None:
    """Change entries of a file of `torch.save`, or of DCP's metadata."""
    is_metadata = path.name == ".metadata"
    data = path.read_bytes()
    with warnings.catch_warnings(), contextlib.suppress(AttributeError, ImportError, RuntimeError, TypeError):
        warnings.simplefilter("ignore")
        value = pickle.loads(data) if is_metadata else torch.load(path, weights_only=False)  # noqa: S301 - our own
        for _ in range(random.choice((1, 1, 2, 4))):
            change_value(random, value)
        if is_metadata:
            data = pickle.dumps(value, protocol=random.choice((2, 4)))
        else:
            stream = io.BytesIO()
            torch.save(value, stream)
            data = stream.getvalue()
    path.write_bytes(data)


# ---- files of a folder


def _bytes(random: Random, folder: Path, files: list[Path], canary: Path) -> None:
    """Flip bits, cut, overwrite or insert bytes."""
    path = random.choice(files)
    data = bytearray(path.read_bytes())
    if not data:
        return
    kind, at = random.randrange(5), random.randrange(len(data))
    if kind == 0:
        for _ in range(random.choice((1, 1, 2, 8))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        other = random.choice(files).read_bytes()
        begin = random.randrange(len(other) + 1)
        part = other[begin : begin + random.choice((1, 4, 8, 64, 4096))]
        data[at : at + random.choice((0, len(part)))] = part
    elif kind == 3:
        data[at : at + 8] = random.choice(
            (b"\xff" * 8, bytes(8), struct.pack("<q", 1 << 40), struct.pack("<ii", 1 << 30, -1))
        )
    else:
        del data[at : at + random.choice((1, 8, 1000))]
    path.write_bytes(data)


def _in_pickle(random: Random, folder: Path, files: list[Path], canary: Path) -> None:
    """Flip and change bytes of a pickle, with right checksums around it."""

    def change(data: bytes) -> bytes:
        found = bytearray(data)
        for _ in range(random.choice((1, 1, 2, 4))):
            at = random.randrange(len(found))
            numbers = [n for n, code in enumerate(found[:-4]) if code in b"JKM\x8a"]
            if numbers and random.random() < 0.4:
                at = random.choice(numbers) + 1
                found[at : at + 4] = random.choice((b"\xff\xff\xff\x7f", b"\0\xca\x9a\x3b", b"\1\0\0\0", b"\xff" * 4))
            elif random.random() < 0.3:
                found[at:at] = bytes([random.choice(b"()]}Nqrhj02ocRbus\x81\x85\x86\x8a\x8b\x8d\x95\x96")])
            else:
                found[at] ^= 1 << random.randrange(8)
        return bytes(found)

    path = random.choice([file for file in files if _has_pickle(file)] or files)
    path.write_bytes(rewrite_pickle(path.read_bytes(), change) if _has_pickle(path) else change(path.read_bytes()))


def _payload(random: Random, folder: Path, files: list[Path], canary: Path) -> None:
    """Put a hostile value into a pickle, in place of it or beside its entries."""
    path = random.choice([file for file in files if _has_pickle(file)] or files)
    if not _has_pickle(path):
        _bytes(random, folder, files, canary)
        return
    made = payloads(canary)
    payload = made[random.choice(sorted(made))]()
    key = random.choice(["args", "iteration", "optimizer", "model", "extra", "module", "ds_version", "step", "state"])

    def change(data: bytes) -> bytes:
        if random.random() < 0.5 and path.name != ".metadata":
            return with_value(data, key, payload)
        return b"\x80\x02" + payload + b"."

    path.write_bytes(rewrite_pickle(path.read_bytes(), change))


def _structure(random: Random, folder: Path, files: list[Path], canary: Path) -> None:
    """Change values of a file, with the rest of it as it should be."""
    usable = [file for file in files if file.suffix in PICKLES or file.name == ".metadata"]
    if usable:
        change_saved(random, random.choice(usable))
    else:
        _documents(random, folder, files, canary)


def _archive(random: Random, folder: Path, files: list[Path], canary: Path) -> None:
    """Change an archive: members gone, exchanged, compressed, or that unpack to gigabytes."""
    usable = [file for file in files if file.read_bytes()[:2] == b"PK"]
    if not usable:
        return _bytes(random, folder, files, canary)
    path = random.choice(usable)
    data = path.read_bytes()
    members = members_of(data)
    names, kind = list(members), random.randrange(6)
    if kind == 0:
        del members[random.choice(names)]
    elif kind == 1:
        one, other = random.choice(names), random.choice(names)
        members[one], members[other] = members[other], members[one]
    elif kind == 2:
        path.write_bytes(archive_of(members, zipfile.ZIP_DEFLATED))
        return None
    elif kind == 3:
        path.write_bytes(bomb(data, random.choice(("data.pkl", "data/0", "version")), 512 << 20))
        return None
    elif kind == 4:
        name = random.choice(names)
        members[name] = members[name][: random.randrange(len(members[name]) + 1)]
    else:
        found = bytearray(data)
        at = random.choice([n for n in range(len(found) - 4) if found[n : n + 2] == b"PK"])
        found[at + random.randrange(46) : at + 46] = random.randbytes(random.choice((1, 2, 4)))
        path.write_bytes(found)
        return None
    path.write_bytes(archive_of(members))
    return None


def _names(random: Random, folder: Path, files: list[Path], canary: Path) -> None:
    """Remove, exchange or replace files."""
    one, other = random.choice(files), random.choice(files)
    kind = random.randrange(5)
    if kind == 0:
        one.unlink()
    elif kind == 1:
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif kind == 2:
        one.unlink()
        one.mkdir()
    elif kind == 3:
        one.unlink()
        os.mkfifo(one)
    elif one.parent != folder:
        shutil.rmtree(one.parent)
    else:
        one.write_bytes(b"")


def _documents(random: Random, folder: Path, files: list[Path], canary: Path) -> None:
    """Change texts: trackers, JSON, and the header of a file of safetensors."""
    usable = [file for file in files if file.suffix in (".json", ".txt", ".safetensors") or file.name == "latest"]
    if not usable:
        return _bytes(random, folder, files, canary)
    path = random.choice(usable)
    data = path.read_bytes()
    if path.suffix in (".json", ".safetensors"):
        begin = 8 if path.suffix == ".safetensors" else 0
        end = begin + int.from_bytes(data[:8], "little") if begin else len(data)
        table = json.loads(data[begin:end])
        change_value(random, table)
        header = json.dumps(table).encode()
        if random.random() < 0.2:
            header = random.choice(
                (b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b'{"a":1,"a":2}', b"\xff", b"{", b"1e999")
            )
        size = random.choice((len(header), len(header), len(header), 1 << 40, 1 << 63, 0)).to_bytes(8, "little")
        path.write_bytes(header if not begin else size + header + data[end:])
    else:
        path.write_text(random.choice(TOKENS))
    return None


def _has_pickle(path: Path) -> bool:
    return path.name == ".metadata" or path.suffix in PICKLES


Mutation = Callable[[Random, Path, list[Path], Path], None]
MUTATIONS: Mapping[str, Mutation] = {
    "bytes": _bytes,
    "pickle": _in_pickle,
    "payload": _payload,
    "values": _structure,
    "archive": _archive,
    "names": _names,
    "documents": _documents,
}
_WEIGHTS = (3, 3, 4, 4, 2, 1, 2)


def mutate(random: Random, folder: Path, canary: Path) -> str:
    """Change a folder in one way; return its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    name = random.choices(list(MUTATIONS), _WEIGHTS)[0]
    MUTATIONS[name](random, folder, files, canary)
    return name
