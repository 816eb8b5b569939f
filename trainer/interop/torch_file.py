"""Opens pickles of other programs: files of `torch.save`, and the metadata of DCP. No code in them is run.

torch's own reader of weights does the former. Whatever else a file names, is a `PlainObject` here: it is neither
imported nor called.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from reprise.errors import CheckpointError
from reprise.storage import failed_read, open_regular, shown

_FLOATS = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
# What the readers of Python and torch raise for damaged files.
_DAMAGE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


# The reason in a message of torch, without its advice to run the code.
_REASON = re.compile(r"(?:error: |\n)([^\n]+?)(?: Please [^\n]*)?\n\nCheck the documentation")


class PickleProblem(ValueError):
    """A damaged pickle, or one of another form."""


class PlainObject:
    """Stand-in for an object of a class that is not loaded.

    Attributes:
        values: the arguments of the class; for an enumeration's member, its value or its name.
        attributes: its attributes by name, as of an `argparse.Namespace`.
    """

    __slots__ = ("attributes", "values")

    def __new__(cls, *values: object, **_: object) -> PlainObject:
        stand_in = super().__new__(cls)
        stand_in.values, stand_in.attributes = values, {}
        return stand_in

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, Mapping):
            self.attributes = {name: value for name, value in state.items() if isinstance(name, str)}
        else:
            self.values = state if isinstance(state, tuple) else (state,)

    def __repr__(self) -> str:
        return ", ".join(map(shown, self.values)) or "an object of a class that is not loaded"


class FilePart(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._descriptor, self._begin, self._length, self._at = open_regular(path), offset, length, 0

    def readable(self) -> bool:
        """Return whether it can be read."""
        return True

    def seekable(self) -> bool:
        """Return whether it can be read from any byte on."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte of the part."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        """Return the byte to read next."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes of the part into memory."""
        count = max(0, min(len(buffer), self._length - self._at))
        count = os.preadv(self._descriptor, [memoryview(buffer)[:count]], self._begin + self._at)
        self._at += count
        return count

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def open_torch_file(path: Path) -> Mapping[Any, Any]:
    """Return the dictionary in a file; its tensors are memory-mapped.

    Raises:
        CheckpointError: if it is damaged, or does not hold a dictionary.
        UnreadableError: if it cannot be read at the moment.
    """
    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise _unreadable(path, f"an object of {type(content).__name__}")
    return content


def read_torch_file(path: Path) -> Any:
    """Return the content of a file; its tensors are memory-mapped.

    Raises:
        CheckpointError: if it is damaged.
        UnreadableError: if it cannot be read at the moment.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return load_plain(file, path)
    except OSError as error:
        raise failed_read("A file of torch cannot be read", error, where=path) from error
    except PickleProblem as error:
        raise _unreadable(path, str(error)) from error


def load_plain(file: Any, path: Path | None = None, *, admits_all: bool = True) -> Any:
    """Return the value of a `torch.save`.

    Args:
        file: its bytes, whose checksums are compared.
        path: the path of the same bytes, to map them; otherwise they are read.
        admits_all: whether objects of other classes become `PlainObject`; otherwise they are refused.

    Raises:
        PickleProblem: if it is damaged, or for an object not admitted.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if packed := [member.filename for member in members if member.compress_type]:
                raise PickleProblem(f"{shown(packed[0])} is compressed, as torch writes nothing")
            # torch writes 0 for all where it is set to leave checksums out.
            if any(member.CRC for member in members) and (name := archive.testzip()):
                raise PickleProblem(f"another checksum of {shown(name)}")
        file.seek(0)
        names = get_unsafe_globals_in_checkpoint(file) if admits_all else []
        file.seek(0)
        with safe_globals([(PlainObject, name) for name in names]):
            return torch.load(path or file, map_location="cpu", weights_only=True, mmap=path is not None)
    except PickleProblem:
        raise
    except _DAMAGE as error:
        reason = _REASON.search(text := str(error))
        raise PickleProblem(f"{type(error).__name__}: {(reason[1] if reason else text)[:200]}") from None


class ForeignClass(PickleProblem):
    """A class that DCP's metadata does not have."""


# Packages whose classes DCP's metadata has: those of torch and Megatron-Core, and paths. Python 3.11.0 to 3.11.3
# pickles members of enumerations by `getattr`.
_RECORDS = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.", "pathlib", "torch.serialization")


class _Reader(pickle.Unpickler):
    """Reads a pickle in which classes of `_RECORDS` are plain objects, and which has no other class.

    A pickle can set attributes of a class, which would outlast the read, but not where a class has `__setstate__`.
    """

    def find_class(self, module: str, name: str) -> Any:
        member = getattr(torch, name, None) if module == "torch" else None
        if member is torch.Size or isinstance(member, torch.dtype):
            return member
        if module.startswith(_RECORDS) or (module, name) == ("builtins", "getattr"):
            return PlainObject
        raise ForeignClass(f"{module[:200]}.{name[:200]}, which is no part of DCP's metadata")


def unpickle_records(data: bytes) -> Any:
    """Return the value in DCP's metadata, with plain objects in place of those of torch's classes.

    Raises:
        ForeignClass: for another class.
        PickleProblem: if it is damaged.
    """
    try:
        return _Reader(io.BytesIO(data)).load()
    except PickleProblem:
        raise
    except _DAMAGE as error:
        raise PickleProblem(f"{type(error).__name__}: {str(error)[:200]}") from None


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor of floating-point numbers, each with a place of its own in the file."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _FLOATS or value.layout is not torch.strided:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of parsed arguments, none for a value of another kind.

    Their own class is loaded in a process that has imported Megatron-Core, which registers it with torch.
    """
    if isinstance(value, PlainObject):
        return dict(value.attributes)
    return dict(vars(value)) if isinstance(value, argparse.Namespace) else {}


def _unreadable(path: Path, actual: str) -> CheckpointError:
    return CheckpointError(
        "A file of torch cannot be read",
        where=path,
        expected="a dictionary that torch.save wrote, whole",
        found=actual,
        fix="The file is missing, cut short or damaged; copy it again, or take another checkpoint.",
    )
