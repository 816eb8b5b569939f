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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from reprise.errors import CheckpointError
from reprise.storage import failed_read, open_regular, read_regular, shown

_MOST_METADATA_BYTES = 4 << 30  # 200 bytes per chunk: room for twenty million
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


class _FilePart(io.RawIOBase):
    """A byte range presented as a separate file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset in the part."""
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read the part's next bytes into memory, and return their count."""
        count = max(0, min(len(buffer), self._length - self._at))
        count = os.preadv(self._file.fileno(), [memoryview(buffer)[:count]], self._offset + self._at)
        self._at += count
        return count


def read_torch_file(path: Path, part: tuple[int, int] | None = None) -> Any:
    """Return a file's content, with memory-mapped tensors. Objects with other classes become `PlainObject`.

    Checksums are verified.

    Args:
        part: The offset and length of a `torch.save` file within the file. Its tensors are read.

    Raises:
        CheckpointError: The file is damaged.
        UnreadableError: The file cannot be read at the moment.
    """
    with _reading(path), os.fdopen(open_regular(path), "rb") as file:
        content: Any = file if part is None else _FilePart(file, *part)
        with zipfile.ZipFile(content) as archive:
            members = archive.infolist()
            if packed := [member.filename for member in members if member.compress_type]:
                raise pickle.UnpicklingError(f"{shown(packed[0])} is compressed, which torch never does")
            # torch writes 0 everywhere if it is set to omit checksums.
            if any(member.CRC for member in members) and (name := archive.testzip()):
                raise pickle.UnpicklingError(f"another checksum of {shown(name)}")
        content.seek(0)
        names = get_unsafe_globals_in_checkpoint(content)
        content.seek(0)
        with safe_globals([(PlainObject, name) for name in names]):
            return torch.load(
                path if part is None else content, map_location="cpu", weights_only=True, mmap=part is None
            )


def read_records(path: Path) -> Any:
    """Return the content of DCP's metadata, with plain objects in place of torch's classes.

    Raises:
        CheckpointError: The file is damaged, or names other programs' classes.
        UnreadableError: The file cannot be read at the moment.
    """
    with _reading(path):
        return _Reader(io.BytesIO(read_regular(path, limit_bytes=_MOST_METADATA_BYTES))).load()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise failed_read("A torch file cannot be read", error, where=path) from error
    except _DAMAGE as error:
        reason = _REASON.search(text := str(error))
        raise CheckpointError(
            "A torch file cannot be read",
            where=path,
            found=f"{type(error).__name__}: {(reason[1] if reason else text)[:200]}",
            fix="The file is truncated or damaged, or another program wrote it: copy it again, or import another "
            "checkpoint or form, such as a Hugging Face folder.",
        ) from None


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
        raise pickle.UnpicklingError(f"{module[:100]}.{name[:100]}, which is not part of DCP metadata")


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
