"""Reads pickles of other programs, bounded by their size. Nothing named in them is imported or called.

It is Python's own unpickler written in Python: the unpickler in C allocates memory for any number of values in a
damaged file. A reader states the names it admits and a placeholder for each.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

# A value takes up to 100 bytes of memory, so the values of a pickle take at most 100 MB and 3 times its files.
_LEAST_READS, _BYTES_OF_A_READ = 1 << 20, 32
_MOST_NUMBER_BYTES = 255
_MOST_DEPTH = 100
# Opcodes that allocate what they name, or that look names up elsewhere.
_REFUSED = (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.EXT1, pickle.EXT2, pickle.EXT4)


class PickleProblem(ValueError):
    """A damaged pickle, or a pickle of more than its size can hold."""


class ForeignClass(PickleProblem):
    """A class not admitted."""


def most_reads(total_bytes: int) -> int:
    """Return the maximum number of parts of a pickle to read.

    Args:
        total_bytes: the size of the pickle's file, or of all files described by it.
    """
    return _LEAST_READS + total_bytes // _BYTES_OF_A_READ


def unpickle(
    data: bytes,
    find: Callable[[str, str], Any],
    *,
    most: int,
    persistent: Callable[[object], Any] | None = None,
    is_key: Callable[[object], bool] = lambda key: False,
) -> Any:
    """Return the value in a pickle.

    Args:
        find: returns the substitute of a class or a function, by module and name. That of an enumeration is called
            with the value of a member, or with its name. Raises `ForeignClass`.
        most: the maximum number of parts to read.
        persistent: returns the substitute of a value stored elsewhere.
        is_key: whether a value, other than a number, a string or a flat tuple of them, may be a key of a dictionary.

    Raises:
        ForeignClass: from `find`.
        PickleProblem: if the pickle is damaged.
    """
    reader = _Unpickler(_Stream(data, most))
    reader.find, reader.persistent, reader.is_key = find, persistent, is_key
    try:
        return reader.load()
    except PickleProblem:
        raise
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AssertionError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        RecursionError,
        RuntimeError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise PickleProblem(f"{type(error).__name__}: {str(error)[:200]}") from None


def require_tree(value: object, children: Callable[[object], Iterable[object] | None], *, most: int) -> None:
    """Refuse a value inside itself, deep nesting, or too many parts for any walk to end.

    A pickle refers to a repeated value by its number, so a few bytes can double a value again and again.

    Args:
        children: returns the parts of a value; None if it has none.

    Raises:
        PickleProblem: if it is such a value.
    """
    sizes, inside = dict[int, int](), set[int]()

    def size_of(part: object) -> int:
        return sizes.get(id(part), 1 + (len(part) // _BYTES_OF_A_READ if isinstance(part, str | bytes) else 0))

    stack: list[tuple[object, list[object] | None]] = [(value, None)]
    while stack:
        item, parts = stack.pop()
        if parts is not None:
            sizes[id(item)] = size = 1 + sum(map(size_of, parts))
            inside.discard(id(item))
            if size > most:
                raise PickleProblem(f"values within values, more than {most} in all")
        elif id(item) in inside:
            raise PickleProblem("a value that is in itself")
        elif id(item) not in sizes and (below := children(item)) is not None:
            inside.add(id(item))
            if len(inside) > _MOST_DEPTH:
                raise PickleProblem(f"values nested deeper than {_MOST_DEPTH} levels")
            members = list(below)
            stack.append((item, members))
            stack += ((part, None) for part in members if children(part) is not None)


def check_keys(keys: Iterable[object], is_key: Callable[[object], bool]) -> None:
    """Refuse keys whose hash may take any time, as tuples within tuples do.

    Raises:
        PickleProblem: for such a key.
    """
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        if not all(part is None or type(part) in (str, bytes, int, float, bool) or is_key(part) for part in parts):
            raise PickleProblem(f"a key of a dictionary that is a {type(key).__name__}")


class _Stream(io.BytesIO):
    """The bytes of a pickle, of which a limited number of parts is read."""

    def __init__(self, data: bytes, most: int) -> None:
        super().__init__(data)
        self._left = most

    def read(self, size: int | None = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise PickleProblem("more values than a file of its size describes")
        return super().read(size)


class _Unpickler(pickle._Unpickler):
    """The opcodes of pickles, with checks of what they state."""

    find: Callable[[str, str], Any]
    persistent: Callable[[object], Any] | None
    is_key: Callable[[object], bool]
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        is_getattr = module in ("builtins", "__builtin__") and name == "getattr"  # torch.save writes Python 2's name
        return self._enum_member if is_getattr else self.find(module, name)

    @staticmethod
    def _enum_member(substitute: object, name: object) -> Any:
        """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickles as `getattr(class, name)`."""
        if not callable(substitute) or type(name) is not str:
            raise ForeignClass("builtins.getattr of no enumeration")
        return substitute(name)

    def persistent_load(self, pid: object) -> Any:
        if self.persistent is None:
            raise PickleProblem("a value that is stored elsewhere")
        return self.persistent(pid)

    def _load_frame(self) -> None:
        """Read on in the file: a frame only tells how many bytes to read ahead."""
        self.read(8)  # type: ignore[attr-defined]

    def _load_long4(self) -> None:
        (count,) = struct.unpack("<i", self.read(4))  # type: ignore[attr-defined]
        if not 0 <= count <= _MOST_NUMBER_BYTES:
            raise PickleProblem(f"a number of {count} bytes")
        self.stack.append(int.from_bytes(self.read(count), "little", signed=True))  # type: ignore[attr-defined]

    def _load_build(self) -> None:
        """Set the attributes of a value, never of a class or a tensor: they would outlast the read."""
        target = self.stack[-2]
        if callable(target) or isinstance(target, torch.Tensor):
            kind = target if isinstance(target, type) else type(target).__name__
            raise ForeignClass(f"attributes of {kind}, which is no value")
        if isinstance(target, OrderedDict):  # a module's `_metadata`
            self.stack.pop()
        else:
            super().load_build()  # type: ignore[misc]

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items(self.stack[-1], [key], [value])

    def _load_setitems(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self._set_items(self.stack[-1], items[::2], items[1::2])

    def _load_dict(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self.stack.append({})
        self._set_items(self.stack[-1], items[::2], items[1::2])

    def _set_items(self, target: object, keys: Iterable[object], values: Iterable[object]) -> None:
        if not isinstance(target, dict):
            raise PickleProblem(f"entries of a {type(target).__name__}")
        check_keys(keys, self.is_key)
        target.update(zip(keys, values, strict=True))

    def _load_additems(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        check_keys(items, self.is_key)
        if not isinstance(self.stack[-1], set):
            raise PickleProblem(f"members of a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(items)

    def _load_frozenset(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        check_keys(items, self.is_key)
        self.stack.append(frozenset(items))

    def _load_newobj_ex(self) -> None:
        """Make an object; only classes not admitted take arguments by name."""
        self.stack[-1:] = []
        super().load_newobj()  # type: ignore[misc]

    def _refuse(self) -> None:
        raise PickleProblem("an opcode that plain data does not have")

    _checked: dict[int, Any] = {
        **dict.fromkeys((code[0] for code in _REFUSED), _refuse),
        pickle.FRAME[0]: _load_frame,
        pickle.LONG4[0]: _load_long4,
        pickle.BUILD[0]: _load_build,
        pickle.SETITEM[0]: _load_setitem,
        pickle.SETITEMS[0]: _load_setitems,
        pickle.DICT[0]: _load_dict,
        pickle.ADDITEMS[0]: _load_additems,
        pickle.FROZENSET[0]: _load_frozenset,
        pickle.NEWOBJ_EX[0]: _load_newobj_ex,
    }
    dispatch = {**pickle._Unpickler.dispatch, **_checked}
