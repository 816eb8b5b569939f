"""Opens a file of `torch.save` without running any code in it, and within bounds set by its size."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from reprise.errors import CheckpointError
from reprise.files import failed_read, open_regular
from reprise.json_file import shown
from trainer.interop.plain_pickle import ForeignClass, PickleProblem, check_keys, most_reads, require_tree, unpickle
from trainer.interop.torch_archive import Storage, TorchArchive

_OLDER = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle of 0x1950a86a20f9469cfc6c, see torch/serialization.py
_FLOATS = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
_MOST_DIMENSIONS = 64  # of torch's tensors
_PICKLE, _BYTE_ORDER = "data.pkl", "byteorder"


class Unread:
    """Placeholder for an object of a class not admitted; its content is discarded."""

    def __new__(cls, *_: object) -> Unread:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class PlainObject:
    """Placeholder for an object of a class not admitted, with its content as plain data.

    Attributes:
        values: the arguments of the class; for an enumeration's member, its value or its name.
        attributes: its attributes by name, as of an `argparse.Namespace`.
    """

    values: tuple[object, ...]
    attributes: Mapping[str, Any]

    def __new__(cls, *values: object) -> PlainObject:
        placeholder = super().__new__(cls)
        placeholder.values, placeholder.attributes = values, {}
        return placeholder

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, Mapping):
            self.attributes = {name: value for name, value in state.items() if isinstance(name, str)}

    def __repr__(self) -> str:
        return ", ".join(map(shown, self.values)) or "an object of a class that is not admitted"


Placeholder = type[Unread] | type[PlainObject]


def open_torch_file(path: Path, placeholder: Placeholder = Unread, *, is_checked: bool = True) -> Mapping[Any, Any]:
    """Return the dictionary in a file; its tensors are memory-mapped.

    Args:
        placeholder: replaces every object except numbers, strings, lists, dictionaries and dense tensors.
        is_checked: whether to read the file once and compare the checksums in it.

    Raises:
        CheckpointError: if it is damaged, or does not hold a dictionary.
        UnreadableError: if it cannot be read at the moment.
    """
    try:
        if _is_older(path):
            raise CheckpointError(
                "A file has the form of torch before 1.6, which cannot be mapped",
                where=path,
                expected="a zip archive, as torch.save writes",
                fix="Load it with torch.load and save it with torch.save of a newer torch, where its program is "
                "installed and its writer is trusted.",
            )
        content = load_plain(mapped(path, path.stat().st_size), placeholder, is_checked=is_checked)
    except OSError as error:
        raise failed_read("A file of torch cannot be read", error, where=path) from error
    except PickleProblem as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(content, Mapping):
        raise _unreadable(path, f"an object of {type(content).__name__}")
    return content


def load_plain(raw: torch.Tensor, placeholder: Placeholder | None, *, is_checked: bool = True) -> Any:
    """Return the value of a `torch.save`; its tensors are views of `raw`.

    Args:
        raw: the bytes of the file.
        placeholder: as for `open_torch_file`; None refuses such objects.

    Raises:
        ForeignClass: for an object not admitted.
        PickleProblem: if they are damaged.
    """
    archive = TorchArchive.open(raw)
    if is_checked:
        archive.check()
    if archive.read(_BYTE_ORDER, b"little") != b"little":
        raise PickleProblem("numbers with their highest byte first")
    most = most_reads(raw.numel())
    data = archive.read(_PICKLE)
    value = unpickle(data, _Names(placeholder), most=most, persistent=archive.storage, is_key=_is_key)
    require_tree(value, _children, most=4 * most)
    return value


# ---- what pickles of torch name


@dataclass(frozen=True, slots=True)
class _Names:
    """What stands for the classes and functions in a pickle of torch."""

    placeholder: Placeholder | None

    def __call__(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage"):
            member = _STORAGES.get(name) or getattr(torch, name, None)
            if isinstance(member, torch.dtype):
                return member
        if module in _ATTACKS:
            raise PickleProblem(f"{module}.{name[:200]}, which no state has, and which would run a program")
        constructor = _MADE.get(f"{module}.{name}")
        if constructor is not None:
            return constructor
        if self.placeholder is None:
            raise ForeignClass(f"{module[:200]}.{name[:200]}, which is no plain data")
        return self.placeholder


# Nothing is called anyway: a file with such a name was made to do harm.
_ATTACKS = {"nt", "os", "posix", "sys"}
_STORAGES = {
    "UntypedStorage": torch.uint8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}


def _tensor(storage: object, offset: Any, size: Any, stride: Any, *_: object) -> torch.Tensor:
    """Return a tensor of a storage, all of whose numbers are there."""
    are_numbers = type(offset) is int and offset >= 0 and _are_sizes(size) and _are_sizes(stride)
    if not isinstance(storage, Storage) or not are_numbers:
        raise PickleProblem("a tensor without storage, shape and strides")
    end = offset + 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if 0 not in size and end * storage.dtype.itemsize > storage.memory.nbytes():
        raise PickleProblem(f"a tensor of shape {shown(size)}, for which the storage is too small")
    empty = torch.empty(0, dtype=storage.dtype)
    return empty.new_empty(size) if 0 in size else empty.set_(storage.memory, offset, size, stride)


def _parameter(tensor: object, *_: object) -> object:
    return tensor


def _subclassed(function: object, _: object, arguments: object, *__: object) -> object:
    """Return the tensor beneath a subclass or attributes."""
    if not callable(function) or not isinstance(arguments, tuple):
        raise PickleProblem("a tensor without a function that makes it")
    return function(*arguments)


def _size(items: object = ()) -> torch.Size:
    if not isinstance(items, tuple | list) or not _are_sizes(tuple(items)):
        raise PickleProblem("a shape that is no list of numbers")
    return torch.Size(items)


def _dictionary(pairs: object = ()) -> OrderedDict[Any, Any]:
    items = [*pairs.items()] if isinstance(pairs, dict) else list(pairs) if isinstance(pairs, list) else []
    check_keys((key for key, _ in items), _is_key)
    return OrderedDict(items)


def _set(items: object = ()) -> set[Any]:
    if not isinstance(items, list | tuple):
        raise PickleProblem("a set of no list")
    check_keys(items, _is_key)
    return set(items)


_MADE: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _dictionary,
    "__builtin__.set": _set,
    "builtins.set": _set,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _subclassed,
    "torch.Tensor": Unread,
    "torch.nn.parameter.Parameter": Unread,
}


def _are_sizes(values: object) -> TypeGuard[Sequence[int]]:
    if not isinstance(values, tuple) or len(values) > _MOST_DIMENSIONS:
        return False
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _is_key(key: object) -> bool:
    return isinstance(key, Unread | PlainObject | torch.dtype) or type(key) is torch.Size


def _children(value: object) -> Iterable[object] | None:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, PlainObject):
        return [value.values, value.attributes]
    return value if type(value) in (list, tuple, set, frozenset) else None  # type: ignore[return-value]


# ---- tensors


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor of floating-point numbers, each with a place of its own in the file."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _FLOATS:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def mapped(path: Path, size: int) -> torch.Tensor:
    """Return the first bytes of a file, which are read when they are used.

    Raises:
        OSError: if it cannot be opened.
        PickleProblem: if `size` is 0: torch writes no empty file.
    """
    os.close(open_regular(path))  # torch names no reason
    if not size:
        raise PickleProblem("an empty file")
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _is_older(path: Path) -> bool:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(len(_OLDER)) == _OLDER


def _unreadable(path: Path, actual: str) -> CheckpointError:
    return CheckpointError(
        "A file of torch cannot be read",
        where=path,
        expected="a dictionary that torch.save wrote, whole",
        found=actual,
        fix="The file is missing, cut short or damaged; copy it again, or take another checkpoint.",
    )
