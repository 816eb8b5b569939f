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

AddTensor = Callable[[Keys, torch.Tensor], None]

TAG = "$type"
DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}

# The errors that malformed content raises.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, IndexError)

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
    encoded = encode(value, keys, is_tagged=True)
    are_numbers = type(value) is tuple and all(isinstance(each, (bool, int, float)) for each in encoded["value"])
    return encoded["value"] if are_numbers else encoded


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
    if TAG in value:
        content = decode(value["value"])
        return _DECODERS[type(content)][value[TAG]](content)
    return {key: decode(member) for key, member in value.items()}


def rebuilt(value: Any, change: Callable[[Any], Any], template: object = None) -> Any:
    """Return nested dicts, lists and tuples with each leaf changed.

    Args:
        template: Its lists and tuples apply where a value was stored by leaf.
    """
    if type(value) in (list, tuple):
        return type(value)(rebuilt(member, change) for member in value)
    if not isinstance(value, dict):
        return change(value)
    if type(value) is not ByLeaf:
        return type(value)({key: rebuilt(member, change) for key, member in value.items()})
    numbers = [str(number) for number in range(len(value))]
    if isinstance(template, (list, tuple)) and value.keys() == {*numbers}:
        rows = zip(numbers, (*template, *numbers), strict=False)
        members = [rebuilt(value[number], change, old) for number, old in rows]
        return tuple(members) if isinstance(template, tuple) else members
    inner = template if isinstance(template, dict) else {}
    return {key: rebuilt(member, change, inner.get(key)) for key, member in value.items()}


def needs_template(value: object) -> bool:
    """Return whether a value has tensors that a load reads only into current ones: shards, or those stored by leaf."""
    return any(reference.is_sharded or reference.is_implied for reference in references(value))


def encode(value: Any, keys: Keys, add: AddTensor | None = None, *, is_tagged: bool = False) -> Any:
    """Return a copy of a value as JSON, with references instead of tensors.

    Args:
        keys: The value's place, for messages.
        add: Adds a tensor under its keys. None refuses tensors.
        is_tagged: Whether a list or dict has a tag too. Its members have none.

    Raises:
        CheckpointError: A value has another type, or contains itself.
    """
    _require_depth(keys)
    kind = type(value)
    if (
        value is None
        or kind is bool
        or (kind is int and abs(value) < _LARGEST_INT)
        or (kind is float and math.isfinite(value))
        or (kind is str and is_unicode(value))
    ):
        return value
    if kind in DICTS.values():
        places = {key: (*keys, key if type(key) is str and is_unicode(key) else repr(key)) for key in value}
        members = {key: encode(value[key], place, add) for key, place in places.items()}
        if kind is dict and not is_tagged and TAG not in value and has_text_keys(value):
            return members
        return {TAG: kind.__name__, "value": [[encode(key, places[key]), members[key]] for key in value]}
    if kind is list and not is_tagged:
        return [encode(member, (*keys, str(number)), add) for number, member in enumerate(value)]
    if isinstance(value, (np.generic, np.ndarray)) and _is_plain(value):
        array = np.asarray(value)  # an empty np.str_ has more bytes than its dtype
        tag = "numpy.ndarray" if isinstance(value, np.ndarray) else "numpy.generic"
        content: Any = [array.dtype.str, list(array.shape), array.tobytes().hex()]
    elif kind in _FORMS:
        tag, content_of = _FORMS[kind]
        content = encode(content_of(value), keys, add if kind in (list, tuple) else None)
    elif add is None or not isinstance(value, torch.Tensor):
        raise _refusal(value, keys)
    else:
        add(keys, value)
        tag, content = "tensor.sharded" if is_sharded(value) else "tensor", stored_name(keys)[1]
    return {TAG: tag, "value": sorted(content, key=json.dumps) if kind in (set, frozenset) else content}


def _refusal(value: object, keys: Keys) -> CheckpointError:
    if isinstance(value, torch.Tensor):
        return CheckpointError(
            "A tensor is in a value that cannot hold tensors, such as a set, or a dict or list in a parameter group",
            where=pointer(keys),
            fix="Pass the tensor under a key of its own.",
        )
    return CheckpointError(
        "A value has a type that a checkpoint cannot store",
        where=pointer(keys),
        expected="a tensor, a number, text, bytes, a boolean, None, or a list, tuple, set or dict of them",
        found=f"an object of {type(value).__name__} {getattr(value, 'dtype', '')}".rstrip(),
        fix="Pass its state_dict()."
        if hasattr(value, "state_dict")
        else "Pass its parts, each of one of these types, such as str(value), list(value), an enum's .value, or an "
        "array's fields and mask.",
    )


def _is_plain(value: np.generic | np.ndarray[Any, Any]) -> bool:
    """Return whether a NumPy value is a scalar or array of numbers, text or times, and of no other class."""
    kinds = (np.ndarray, np.memmap, value.dtype.type)
    return type(value) in kinds and _NUMPY_DTYPE.fullmatch(value.dtype.str) is not None


def _decoded_numpy(content: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = content
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(dtype)
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, bytes.fromhex(data))
    return array.copy()


def _buffer(content: Any) -> io.BytesIO:
    buffer = io.BytesIO(bytes.fromhex(content[0]))
    buffer.seek(content[1])
    return buffer


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that torch calls by a name, or raise an error in `MALFORMED`."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return dtype


# By exact type: the tag, and the function to an encodable content.
_FORMS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    int: ("int", hex),
    float: ("float", str),
    str: ("str", lambda value: value.encode(errors="surrogatepass").hex()),
    complex: ("complex", lambda value: [value.real, value.imag]),
    bytes: ("bytes", bytes.hex),
    bytearray: ("bytearray", bytearray.hex),
    io.BytesIO: ("io.BytesIO", lambda value: [value.getvalue().hex(), value.tell()]),
    torch.dtype: ("torch.dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("torch.device", str),
    TorchVersion: ("torch.version", str),
    torch.Size: ("torch.Size", list),
    **{kind: (kind.__name__, list) for kind in (list, tuple, set, frozenset)},
}
# By the content's type and the tag: the way back.
_DECODERS: dict[type, dict[str, Callable[[Any], Any]]] = {
    str: {
        "int": partial(int, base=16),
        "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}.__getitem__,
        "str": lambda content: bytes.fromhex(content).decode(errors="surrogatepass"),
        "bytes": bytes.fromhex,
        "bytearray": bytearray.fromhex,
        "torch.dtype": torch_dtype,
        "torch.device": torch.device,
        "torch.version": TorchVersion,
        "tensor": TensorReference,
        "tensor.sharded": partial(TensorReference, is_sharded=True),
    },
    list: {
        **{kind.__name__: kind for kind in (list, tuple, set, frozenset)},
        **DICTS,
        "Counter": lambda pairs: Counter(dict(pairs)),
        "complex": lambda parts: complex(*parts),
        "io.BytesIO": _buffer,
        "torch.Size": torch.Size,
        "numpy.ndarray": _decoded_numpy,
        "numpy.generic": lambda content: _decoded_numpy(content)[()],
    },
}
