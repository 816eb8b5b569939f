"""Opens other programs' pickles, `torch.save` files and DCP metadata, without running their code.

torch's weights-only reader opens `torch.save` files. Any other class in a pickle becomes a `PlainObject`: it is neither
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

FLOATS = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
# Errors that Python's and torch's readers raise for damaged files.
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


# The reason in a torch message, without its advice to run the code.
_REASON = re.compile(r"(?:error: |\n)([^\n]+?)(?: Please [^\n]*)?\n\nCheck the documentation")


class PickleProblem(ValueError):
    """A damaged pickle, or a pickle with unexpected content."""


class PlainObject:
    """Stand-in for an object whose class is not loaded.

    Attributes:
        values: The constructor's arguments. For an enumeration member, its value or name.
        attributes: The object's attributes by name, such as an `argparse.Namespace`'s.
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
    """A byte range presented as a separate file."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._descriptor, self._begin, self._length, self._at = open_regular(path), offset, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset in the part."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        """Return the next byte's offset in the part."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read the part's next bytes into memory, and return their count."""
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
    """Return a file's dictionary, with memory-mapped tensors.

    Raises:
        CheckpointError: The file is damaged, or does not hold a dictionary.
        UnreadableError: The file cannot be read at the moment.
    """
    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise _unreadable(path, f"an object of {type(content).__name__}")
    return content


def read_torch_file(path: Path) -> Any:
    """Return a file's content, with memory-mapped tensors.

    Raises:
        CheckpointError: The file is damaged.
        UnreadableError: The file cannot be read at the moment.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return load_plain(file, path)
    except OSError as error:
        raise failed_read("A torch file cannot be read", error, where=path) from error
    except PickleProblem as error:
        raise _unreadable(path, str(error)) from error


def load_plain(file: Any, path: Path | None = None) -> Any:
    """Return the value written by a `torch.save`. Objects with other classes become `PlainObject`.

    Args:
        file: The bytes. Their checksums are verified.
        path: A path to the same bytes, which are then memory-mapped. Without it they are read.

    Raises:
        PickleProblem: The bytes are damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if packed := [member.filename for member in members if member.compress_type]:
                raise PickleProblem(f"{shown(packed[0])} is compressed, which torch never does")
            # torch writes 0 everywhere if it is set to omit checksums.
            if any(member.CRC for member in members) and (name := archive.testzip()):
                raise PickleProblem(f"another checksum of {shown(name)}")
        file.seek(0)
        names = get_unsafe_globals_in_checkpoint(file)
        file.seek(0)
        with safe_globals([(PlainObject, name) for name in names]):
            return torch.load(path or file, map_location="cpu", weights_only=True, mmap=path is not None)
    except PickleProblem:
        raise
    except _DAMAGE as error:
        reason = _REASON.search(text := str(error))
        raise PickleProblem(f"{type(error).__name__}: {(reason[1] if reason else text)[:200]}") from None


class ForeignClass(PickleProblem):
    """A class not found in DCP metadata."""


# Packages with classes in DCP metadata: torch, Megatron-Core, and pathlib. Python 3.11.0 to 3.11.3 pickles enumeration
# members by `getattr`.
_RECORDS = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.", "pathlib", "torch.serialization")


class _Reader(pickle.Unpickler):
    """Reads a pickle. Classes in `_RECORDS` become plain objects, and all others are refused.

    A pickle could set class attributes, which would outlast the read, but not on a class with `__setstate__`.
    """

    def find_class(self, module: str, name: str) -> Any:
        member = getattr(torch, name, None) if module == "torch" else None
        if member is torch.Size or isinstance(member, torch.dtype):
            return member
        if module.startswith(_RECORDS) or (module, name) == ("builtins", "getattr"):
            return PlainObject
        raise ForeignClass(f"{module[:200]}.{name[:200]}, which is not part of DCP metadata")


def unpickle_records(data: bytes) -> Any:
    """Return the value in DCP metadata, with plain objects in place of torch's classes.

    Raises:
        ForeignClass: The pickle names another class.
        PickleProblem: The pickle is damaged.
    """
    try:
        return _Reader(io.BytesIO(data)).load()
    except PickleProblem:
        raise
    except _DAMAGE as error:
        raise PickleProblem(f"{type(error).__name__}: {str(error)[:200]}") from None


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a dense floating-point tensor whose elements each have their own bytes in the file."""
    if not isinstance(value, torch.Tensor) or value.dtype not in FLOATS or value.layout is not torch.strided:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of parsed arguments. Other values have none.

    If the process has imported Megatron-Core, which registers its argument class with torch, that class is loaded.
    """
    if isinstance(value, PlainObject):
        return dict(value.attributes)
    return dict(vars(value)) if isinstance(value, argparse.Namespace) else {}


def _unreadable(path: Path, actual: str) -> CheckpointError:
    return CheckpointError(
        "A torch file cannot be read",
        where=path,
        expected="a complete dictionary written by torch.save",
        found=actual,
        fix="The file is missing, truncated or damaged: copy it again, or use another checkpoint.",
    )
