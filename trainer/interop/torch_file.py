"""Opens a file of `torch.save` without running any code in it."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeGuard

import torch

from trainer.errors import CheckpointError

_OLDER = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle of 0x1950a86a20f9469cfc6c, see torch/serialization.py
_BLOCK_BYTES = 4 << 20
_FLOATS = {torch.float32, torch.bfloat16, torch.float16, torch.float64}


class Unread:
    """Placeholder for an object of a class that torch does not admit; its content is discarded."""

    def __new__(cls, *_: object) -> Unread:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class PlainObject:
    """Placeholder for an object of a class that torch does not admit, with its content as plain data.

    Attributes:
        values: the arguments that the class was called with; that of an enumeration's member is its value.
        attributes: its attributes by name, as of an `argparse.Namespace`.
    """

    values: tuple[object, ...]
    attributes: Mapping[str, Any]

    def __new__(cls, *values: object) -> PlainObject:
        found = super().__new__(cls)
        found.values, found.attributes = values, {}
        return found

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, Mapping):
            self.attributes = {name: value for name, value in state.items() if isinstance(name, str)}

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.values)) or "an object of a class that is not admitted"


def open_torch_file(
    path: Path, placeholder: type[Unread] | type[PlainObject] = Unread, *, is_checked: bool = True
) -> Mapping[Any, Any]:
    """Return the dictionary in a file; its tensors are memory-mapped.

    torch unpickles it with `weights_only=True`. Every class that this does not admit is replaced by `placeholder`, so
    that no module is imported and no function of the file's choice is called.

    Args:
        is_checked: whether to read the file once and compare the checksums in it, which torch ignores.

    Raises:
        CheckpointError: if it is damaged, or does not hold a dictionary.
    """
    try:
        with _torch_s_own_globals():
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            with torch.serialization.safe_globals([(placeholder, name) for name in unknown]):
                found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything; handed on
        if isinstance(error, OSError) and error.filename is not None:
            raise
        if _is_older(path):
            raise CheckpointError(
                "A file has the form of torch before 1.6, which cannot be mapped",
                where=path,
                expected="a zip archive, as torch.save writes",
                fix="Load it with torch.load and save it with torch.save of a newer torch, where its program is "
                "installed and its writer is trusted.",
            ) from error
        raise _unreadable(path, f"{type(error).__name__}: {_telling(str(error))}") from error
    if not isinstance(found, Mapping):
        raise _unreadable(path, f"an object of {type(found).__name__}")
    damaged = damaged_member(path) if is_checked else None
    if damaged is not None:
        raise _unreadable(path, damaged)
    return found


@contextmanager
def _torch_s_own_globals() -> Iterator[None]:
    """Suspend classes that another library has registered with torch, as `import megatron.core` does, until the end."""
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([entry for entry in registered if _is_torch_s(entry)])
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(registered)


def _is_torch_s(entry: Callable[..., Any] | tuple[Callable[..., Any], str]) -> bool:
    name = entry[1] if isinstance(entry, tuple) else entry.__module__
    return name.partition(".")[0] == "torch"


def damaged_member(file: Path | IO[bytes]) -> str | None:
    """Return the error of the first damaged member of a zip archive, None if all are whole.

    torch writes 0 for all checksums if it is set to leave them out.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    return f"{member.filename} is compressed, as torch writes nothing, and may become of any size"
                if member.CRC:
                    with archive.open(member) as part:
                        while part.read(_BLOCK_BYTES):
                            pass
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        return f"another checksum: {error}"
    return None


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor is dense floating point with all its numbers in the file."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        return False
    is_there = value.device.type == "cpu" and value.dtype in _FLOATS
    return is_there and value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _is_older(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_OLDER)) == _OLDER


def _telling(text: str) -> str:
    """Return the message of a torch error, without its advice on torch's own option."""
    lines = [line.strip().removesuffix("WeightsUnpickler error:") for line in text.splitlines()]
    return " ".join(line for line in lines if line and "weights_only" not in line)


def _unreadable(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        "A file of torch cannot be read",
        where=path,
        expected="a dictionary that torch.save wrote, whole",
        found=found,
        fix="The file is missing, cut short or damaged; copy it again, or take another checkpoint.",
    )
