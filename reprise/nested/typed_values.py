"""Python values in JSON: a value without a form in JSON becomes an object with a tag; all others stay the same."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from reprise.errors import CheckpointError
from reprise.nested.stored_names import pointer

TAG = "$type"
DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_LARGEST_INT = 10**308
_SURROGATE = re.compile("[\ud800-\udfff]")
_NUMPY_DTYPE = re.compile(r"[<>|]([biufcSU][0-9]+|[mM]8(\[[0-9]*[A-Za-z]+])?)")  # numbers, text and times


@dataclass(frozen=True, slots=True)
class TensorReference:
    """A tensor within a value, by its stored name.

    Args:
        is_sharded: whether it is a DTensor, which no rank is to read whole unasked.
    """

    name: str
    is_sharded: bool = False


def is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which UTF-8 lacks."""
    return text.isascii() or _SURROGATE.search(text) is None


def encode(value: object, keys: Sequence[str]) -> Any:
    """Return a copy of a value as JSON.

    Args:
        keys: the place of the value, for messages.

    Raises:
        CheckpointError: naming a value of another type, or a value within itself.
    """
    try:
        return _encode(value, keys)
    except RecursionError as error:
        fix = "Look for a dict or list in itself."
        raise CheckpointError("A value is nested too deeply", where=pointer(keys), fix=fix) from error


def encode_number(value: object, keys: Sequence[str]) -> Any:
    """Return a copy of a value of a parameter group as JSON, where an array is a tuple of numbers.

    Raises:
        CheckpointError: as `encode`.
    """
    encoded = encode(value, keys)
    if isinstance(value, tuple) and all(isinstance(member, (bool, int, float)) for member in encoded["value"]):
        return encoded["value"] if type(value) is tuple else encoded
    if type(value) is list:
        return _tagged("list", encoded)
    return _tagged("dict", _pairs(value, keys)) if type(value) is dict and TAG not in encoded else encoded


def decode_number(value: Any) -> Any:
    """Return the value before `encode_number`; an array is a tuple of numbers.

    Raises:
        ValueError: as `decode`, and for an array of anything else or an object without a tag.
    """
    if isinstance(value, list) and all(isinstance(member, (int, float)) for member in value):
        return tuple(value)
    if isinstance(value, list) or (isinstance(value, dict) and TAG not in value):
        raise ValueError(f"{value!r} is no value of a parameter group")
    return decode(value)


def decode(value: Any) -> Any:
    """Return the value before `encode`; an array is a list.

    Raises:
        ValueError: for an object whose tag or content is malformed, or of a later version.
    """
    if isinstance(value, list):
        return [decode(member) for member in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(member) for key, member in value.items()}
    kind = value[TAG]
    try:
        return _DECODERS[kind](value["value"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{kind!r} is no type of a value, or its value is malformed") from error


def _encode(value: object, keys: Sequence[str]) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if isinstance(value, int) and kind is int:
        return value if abs(value) < _LARGEST_INT else _tagged("int", hex(value))
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else _tagged("float", str(value))
    if isinstance(value, str) and kind is str:
        return value if is_unicode(value) else _tagged("str", value.encode(errors="surrogatepass").hex())
    if isinstance(value, dict) and kind in DICTS.values():
        return _encoded_dict(value, keys)
    if isinstance(value, (list, tuple, set, frozenset)) and kind in (list, tuple, torch.Size, set, frozenset):
        members = [_encode(member, (*keys, str(number))) for number, member in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            members.sort(key=json.dumps)
        return members if kind is list else _tagged("torch.Size" if kind is torch.Size else kind.__name__, members)
    return _encoded_scalar(value, keys)


def _encoded_dict(value: dict[Any, Any], keys: Sequence[str]) -> Any:
    has_plain_keys = all(type(key) is str and is_unicode(key) for key in value)
    if type(value) is dict and has_plain_keys and TAG not in value:
        return {key: _encode(member, (*keys, key)) for key, member in value.items()}
    return _tagged(type(value).__name__, _pairs(value, keys))


def _pairs(value: Any, keys: Sequence[str]) -> list[Any]:
    inner = [(key, (*keys, key if type(key) is str and is_unicode(key) else repr(key))) for key in value]
    return [[_encode(key, where), _encode(value[key], where)] for key, where in inner]


def _encoded_scalar(value: object, keys: Sequence[str]) -> Any:
    match value:
        case complex() if type(value) is complex:
            return _tagged("complex", [_encode(value.real, keys), _encode(value.imag, keys)])
        case bytes() | bytearray() if type(value) in (bytes, bytearray):
            return _tagged(type(value).__name__, value.hex())
        case TensorReference():
            return _tagged("tensor.sharded" if value.is_sharded else "tensor", value.name)
        case io.BytesIO() if type(value) is io.BytesIO:
            return _tagged("io.BytesIO", [value.getvalue().hex(), value.tell()])
        case torch.dtype():
            return _tagged("torch.dtype", str(value).removeprefix("torch."))
        case torch.device():
            return _tagged("torch.device", str(value))
        case TorchVersion():
            return _tagged("torch.version", str(value))
        case np.generic() | np.ndarray():
            return _encoded_numpy(value, keys)
        case torch.Tensor():
            raise CheckpointError(
                "A tensor lies in a value that holds none, such as a set, or a dict or list in a parameter group",
                where=pointer(keys),
                fix="Pass the tensor under a key of its own.",
            )
        case _:
            parts = "Pass its parts, each of one of these types, such as str(value), list(value) or an enum's .value."
            raise CheckpointError(
                "A value is neither a tensor nor of a type that a checkpoint holds",
                where=pointer(keys),
                expected="a tensor, a number, text, bytes, a boolean, None, or a list, tuple, set or dict of them",
                found=repr(value) if isinstance(value, str) else f"an object of {type(value).__name__}",
                fix="Pass its state_dict()." if hasattr(value, "state_dict") else parts,
            )


def _encoded_numpy(value: np.generic | np.ndarray[Any, Any], keys: Sequence[str]) -> Any:
    if not _NUMPY_DTYPE.fullmatch(value.dtype.str) or type(value) not in (np.ndarray, np.memmap, value.dtype.type):
        raise CheckpointError(
            "A value of numpy has a dtype or a class that a checkpoint does not hold",
            where=pointer(keys),
            expected="a scalar or an array of numbers, booleans, text, bytes, datetime64 or timedelta64",
            found=f"{type(value).__name__} of dtype {value.dtype}",
            fix="Pass np.asarray(value), each field and a mask as an array of its own, and objects as value.tolist().",
        )
    array = np.asarray(value)  # an empty np.str_ has bytes beyond its own dtype
    content = [array.dtype.str, list(array.shape), array.tobytes().hex()]
    return _tagged("numpy.ndarray" if isinstance(value, np.ndarray) else "numpy.generic", content)


def _tagged(kind: str, content: object) -> dict[str, object]:
    return {TAG: kind, "value": content}


def _decoded_dict(kind: type[dict[Any, Any]]) -> Callable[[Any], Any]:
    def decoded(content: Any) -> dict[Any, Any]:
        members = kind()
        for key, member in _listed(content):
            members[decode(key)] = decode(member)
        return members

    return decoded


def _decoded_members(kind: Callable[[Iterable[Any]], Any]) -> Callable[[Any], Any]:
    return lambda content: kind([decode(member) for member in _listed(content)])


def _decoded_numpy(content: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = _listed(content)
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"{dtype!r} is no dtype of a number, of text or of a time")
    content = bytes.fromhex(data)
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, content)
    if array.nbytes != len(content):
        raise ValueError(f"{len(content)} bytes for {array.nbytes}")
    return array.copy()


def _buffer(content: Any) -> io.BytesIO:
    data, position = _listed(content)
    buffer = io.BytesIO(bytes.fromhex(data))
    buffer.seek(position)
    return buffer


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def _complex(content: Any) -> complex:
    real, imaginary = map(decode, _listed(content))
    return complex(real, imaginary)


def _reference(name: Any, *, is_sharded: bool = False) -> TensorReference:
    if not isinstance(name, str):
        raise TypeError(f"{type(name).__name__} is no name")
    return TensorReference(name, is_sharded)


def _listed(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError(f"{type(content).__name__} is no list")
    return content


_DECODERS: dict[str, Callable[[Any], Any]] = {
    **{name: _decoded_dict(kind) for name, kind in DICTS.items()},
    **{kind.__name__: _decoded_members(kind) for kind in (list, tuple, set, frozenset)},
    "torch.Size": _decoded_members(torch.Size),
    "int": lambda content: int(content, 16),
    "float": lambda content: _FLOATS[content],
    "str": lambda content: bytes.fromhex(content).decode(errors="surrogatepass"),
    "complex": _complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "io.BytesIO": _buffer,
    "tensor": _reference,
    "tensor.sharded": partial(_reference, is_sharded=True),
    "torch.dtype": _dtype,
    "torch.device": torch.device,
    "torch.version": TorchVersion,
    "numpy.ndarray": _decoded_numpy,
    "numpy.generic": lambda content: _decoded_numpy(content)[()],
}
