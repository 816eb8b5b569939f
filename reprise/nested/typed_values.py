"""Python values in JSON. A value without a JSON form becomes an object with a tag, and all others are unchanged."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from reprise.errors import CheckpointError
from reprise.nested.stored_names import Keys, pointer, stored_name
from reprise.tensors.live import is_sharded

TAG = "$type"
DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}

# The errors that malformed content raises.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, IndexError)

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_LARGEST_INT = 10**308
_MAX_DEPTH = 100  # a deeper value contains itself
_SURROGATE = re.compile("[\ud800-\udfff]")
_NUMPY_DTYPE = re.compile(r"[<>|]([biufcSU][0-9]+|[mM]8(\[[0-9]*[A-Za-z]+])?)")  # numbers, text and times


@dataclass(frozen=True, slots=True)
class TensorReference:
    """A reference to a tensor within a value, by stored name.

    Args:
        name: The tensor's stored name.
        is_sharded: Whether it is a rank's part of a global tensor, which ranks read whole only on request.
        is_implied: Whether no value in the checkpoint refers to it, because it was stored by leaf under its own name.
    """

    name: str
    is_sharded: bool = False
    is_implied: bool = False


class ByLeaf(dict[str, Any]):
    """A dict, or a list in old files, whose members a checkpoint stores separately rather than as a single value."""


def is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogate, which UTF-8 cannot encode."""
    return text.isascii() or _SURROGATE.search(text) is None


def has_text_keys(container: Mapping[Any, Any]) -> bool:
    """Return whether all keys are strings with a UTF-8 encoding."""
    return all(type(key) is str and is_unicode(key) for key in container)


def require_text_keys(container: Mapping[Any, Any], keys: Keys) -> None:
    """Refuse a key other than a string, or without a UTF-8 encoding.

    Raises:
        CheckpointError: Names the key.
    """
    for key in container:
        if not isinstance(key, str) or not is_unicode(key):
            raise CheckpointError(
                "A state dict key is not a string, or has no UTF-8 encoding",
                where=pointer(keys) or "the outermost keys",
                found=repr(key),
                fix="JSON keys and file names are strings: use str(key), or a list.",
            )


def leaves(value: object, keys: Keys = ()) -> Iterator[tuple[Keys, object]]:
    """Yield the leaves in nested lists, tuples and dicts, each with its keys.

    Raises:
        CheckpointError: A value is nested too deeply, for instance because it contains itself.
    """
    if not isinstance(value, (dict, list, tuple)):
        yield keys, value
        return
    _require_depth(keys)
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        inner = (*keys, key if isinstance(key, str) else repr(key))
        if isinstance(member, (dict, list, tuple)):
            yield from leaves(member, inner)
        else:  # avoids a generator per number
            yield inner, member


def references(value: object) -> Iterator[TensorReference]:
    """Yield the tensor references in a value."""
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, TensorReference))


def _require_depth(keys: Keys) -> None:
    if len(keys) > _MAX_DEPTH:
        raise CheckpointError(
            "A state dict is nested too deeply",
            where=f"{pointer(keys[:4])}/...",
            expected=f"at most {_MAX_DEPTH} levels",
            fix="Look for a dict or list that contains itself.",
        )


def encode_number(value: object, keys: Keys) -> Any:
    """Return a copy of a parameter group's value as JSON, in which an array is a tuple of numbers.

    Raises:
        CheckpointError: See `encode`.
    """
    encoded = encode(value, keys)
    if type(value) is tuple and all(isinstance(member, (bool, int, float)) for member in encoded["value"]):
        return encoded["value"]
    if type(value) is list:
        return _tagged("list", encoded)
    return _tagged("dict", _pairs(value, keys, None)) if type(value) is dict and TAG not in encoded else encoded


def decode_number(value: Any) -> Any:
    """Return the value before `encode_number`. An array is a tuple of numbers.

    Raises:
        Exception: See `decode`.
    """
    return tuple(value) if isinstance(value, list) else decode(value)


def decode(value: Any) -> Any:
    """Return the value before `encode`. An array is a list.

    Raises:
        Exception: An object's tag or content is malformed, or from a later version. The class is in `MALFORMED`.
    """
    if isinstance(value, list):
        return [decode(member) for member in value]
    if not isinstance(value, dict):
        return value
    return _DECODERS[value[TAG]](value["value"]) if TAG in value else {key: decode(value[key]) for key in value}


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested dicts, lists and tuples with each leaf changed."""
    if isinstance(value, dict):
        kind = dict if type(value) is ByLeaf else type(value)
        return kind({key: changed(member, change) for key, member in value.items()})
    return type(value)(changed(member, change) for member in value) if type(value) in (list, tuple) else change(value)


def insert_tensors(value: object, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return a decoded value with tensors, passed by stored name, instead of references."""
    return changed(value, lambda leaf: tensors[leaf.name] if isinstance(leaf, TensorReference) else leaf)


def shaped_like(template: object, value: Any) -> Any:
    """Return a value with a template's lists, tuples and order of keys where it was stored by leaf."""
    if type(value) is not ByLeaf:
        return value
    numbers = [str(number) for number in range(len(value))]
    if isinstance(template, (list, tuple)) and value.keys() == {*numbers}:
        old = [*template, *[None] * len(value)]
        members = [shaped_like(before, value[number]) for before, number in zip(old, numbers, strict=False)]
        return tuple(members) if isinstance(template, tuple) else members
    by_key = template if isinstance(template, Mapping) else {}
    keys = (*(key for key in by_key if key in value), *value)
    return ByLeaf({key: shaped_like(by_key.get(key), value[key]) for key in keys})


def encode(value: Any, keys: Keys, tensors: dict[Keys, torch.Tensor] | None = None) -> Any:
    """Return a copy of a value as JSON, with references instead of tensors.

    Args:
        keys: The value's place, for messages.
        tensors: Receives the tensors by the keys under which they are stored. None refuses tensors.

    Raises:
        CheckpointError: A value has another type, or contains itself.
    """
    kind = type(value)
    if (
        value is None
        or kind is bool
        or (kind is int and abs(value) < _LARGEST_INT)
        or (kind is float and math.isfinite(value))
        or (kind is str and is_unicode(value))
    ):
        return value
    if kind in _CONTAINERS:
        _require_depth(keys)
    if kind is dict and TAG not in value and has_text_keys(value):
        return {key: encode(member, (*keys, key), tensors) for key, member in value.items()}
    if kind in DICTS.values():
        return _tagged(kind.__name__, _pairs(value, keys, tensors))
    if kind in _MEMBERS:
        inner = tensors if kind in (list, tuple) else None
        members = [encode(member, (*keys, str(number)), inner) for number, member in enumerate(value)]
        if kind in (set, frozenset):
            members.sort(key=json.dumps)
        return members if kind is list else _tagged(_MEMBERS[kind], members)
    if isinstance(value, (np.generic, np.ndarray)):
        return _encoded_numpy(value, keys)
    if isinstance(value, torch.Tensor) and tensors is not None:
        tensors[keys] = value
        return _tagged("tensor.sharded" if is_sharded(value) else "tensor", stored_name(keys)[1])
    if kind in _FORMS:
        tag, content, _ = _FORMS[kind]
        return _tagged(tag, content(value))
    raise _refusal(value, keys)


def _refusal(value: object, keys: Keys) -> CheckpointError:
    if isinstance(value, torch.Tensor):
        return CheckpointError(
            "A tensor is in a value that cannot hold tensors, such as a set, or a dict or list in a parameter group",
            where=pointer(keys),
            fix="Pass the tensor under a key of its own.",
        )
    parts = "Pass its parts, each of one of these types, such as str(value), list(value) or an enum's .value."
    return CheckpointError(
        "A value has a type that a checkpoint cannot store",
        where=pointer(keys),
        expected="a tensor, a number, text, bytes, a boolean, None, or a list, tuple, set or dict of them",
        found=repr(value) if isinstance(value, str) else f"an object of {type(value).__name__}",
        fix="Pass its state_dict()." if hasattr(value, "state_dict") else parts,
    )


def _pairs(value: Any, keys: Keys, tensors: dict[Keys, torch.Tensor] | None) -> list[Any]:
    inner = [(key, (*keys, key if type(key) is str and is_unicode(key) else repr(key))) for key in value]
    return [[encode(key, where, None), encode(value[key], where, tensors)] for key, where in inner]


def _encoded_numpy(value: np.generic | np.ndarray[Any, Any], keys: Keys) -> Any:
    if not _NUMPY_DTYPE.fullmatch(value.dtype.str) or type(value) not in (np.ndarray, np.memmap, value.dtype.type):
        raise CheckpointError(
            "A NumPy value has a dtype or class that a checkpoint cannot store",
            where=pointer(keys),
            expected="a scalar or an array of numbers, booleans, text, bytes, datetime64 or timedelta64",
            found=f"{type(value).__name__} of dtype {value.dtype}",
            fix="Pass np.asarray(value), each field and a mask as an array of its own, and objects as value.tolist().",
        )
    array = np.asarray(value)  # an empty np.str_ has more bytes than its dtype
    content = [array.dtype.str, list(array.shape), array.tobytes().hex()]
    return _tagged("numpy.ndarray" if isinstance(value, np.ndarray) else "numpy.generic", content)


def _tagged(kind: str, content: object) -> dict[str, object]:
    return {TAG: kind, "value": content}


def _decoded_dict(kind: type[dict[Any, Any]], content: Any) -> dict[Any, Any]:
    return kind({decode(key): decode(member) for key, member in content})


def _decoded_members(kind: Callable[[Any], Any], content: Any) -> Any:
    return kind([decode(member) for member in _instance(list, content)])


def _decoded_numpy(content: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = content[0], content[1], bytes.fromhex(content[2])
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype if _NUMPY_DTYPE.fullmatch(dtype) else "", data)
    return array.copy()


def _buffer(content: Any) -> io.BytesIO:
    buffer = io.BytesIO(bytes.fromhex(content[0]))
    buffer.seek(content[1])
    return buffer


def _instance(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


# By exact type: the tag, the encoder to JSON, and the decoder.
_FORMS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: ("int", hex, lambda content: int(content, 16)),
    float: ("float", str, _FLOATS.__getitem__),
    str: (
        "str",
        lambda value: value.encode(errors="surrogatepass").hex(),
        lambda content: bytes.fromhex(content).decode(errors="surrogatepass"),
    ),
    complex: (
        "complex",
        lambda value: [encode(value.real, ()), encode(value.imag, ())],
        lambda content: complex(*map(decode, content)),
    ),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    bytearray: ("bytearray", bytearray.hex, bytearray.fromhex),
    io.BytesIO: ("io.BytesIO", lambda value: [value.getvalue().hex(), value.tell()], _buffer),
    torch.dtype: (
        "torch.dtype",
        lambda value: str(value).removeprefix("torch."),
        lambda name: _instance(torch.dtype, getattr(torch, name)),
    ),
    torch.device: ("torch.device", str, torch.device),
    TorchVersion: ("torch.version", str, TorchVersion),
}
_MEMBERS: dict[type, str] = {
    torch.Size: "torch.Size",
    **{kind: kind.__name__ for kind in (list, tuple, set, frozenset)},
}
_CONTAINERS = {*DICTS.values(), *_MEMBERS}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    **{name: partial(_decoded_dict, kind) for name, kind in DICTS.items()},
    **{name: partial(_decoded_members, kind) for kind, name in _MEMBERS.items()},
    **{tag: way_back for tag, _, way_back in _FORMS.values()},
    "tensor": lambda name: TensorReference(_instance(str, name)),
    "tensor.sharded": lambda name: TensorReference(_instance(str, name), is_sharded=True),
    "numpy.ndarray": _decoded_numpy,
    "numpy.generic": lambda content: _decoded_numpy(content)[()],
}
