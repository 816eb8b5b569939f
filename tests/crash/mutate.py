"""Changes inputs as a fuzzer does: bytes here and there, and JSON as a tree."""

from __future__ import annotations

import json
import random
from typing import Any

_MOST_BYTES = 1 << 16
# What has broken parsers before: the edges of numbers, half a surrogate pair, paths, other kinds of everything.
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**400, -0.0, 1.5, 1e308, "", "0", "NaN",
    "x" * 300, "\ud800", "\0", "../x", "/etc/passwd", "iter", [], {}, [[]], [0], {"": 0}, [1 << 62] * 40, [1] * 70,
    "F32", "BF16", "I64", "00" * 8, "__metadata__",
)  # fmt: skip
_TOKENS = (
    b"NaN", b"Infinity", b"1e999", b"-1e999", b"[" * 70, b'{"a":' * 70, b"\\ud800", b"\xff", b"\xef\xbb\xbf",
    b"9" * 5000, b"\0", b'"', b"}", b"{", b",", b"18446744073709551616", b"../", b"-1", b"1.0",
)  # fmt: skip


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Return `data` with one to four changes."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        changed = _tree(data, chance) if chance.random() < 0.6 else None
        data = changed if changed is not None else _bytes(data, chance)
    return data[:_MOST_BYTES]


def _bytes(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    to = min(len(data), at + chance.choice((0, 1, 1, 4, 16, 200)))
    piece = chance.choice(
        (b"", bytes([chance.randrange(256)]), chance.choice(_TOKENS), data[at:to] * 2, chance.randbytes(4))
    )
    return data[:at] + piece + data[to:]


def _tree(data: bytes, chance: random.Random) -> bytes | None:
    """Return JSON with a node changed; None if the data is not JSON, complete or without its last brace."""
    text = data.decode(errors="replace").rstrip()
    for closing in ("", "}"):
        try:
            value = json.loads(text + closing)
            break
        except (ValueError, RecursionError):
            continue
    else:
        return None
    nodes = _nodes(value)
    if not nodes:
        return None
    _change(*chance.choice(nodes), nodes=nodes, chance=chance)
    try:
        changed = json.dumps(value, separators=(",", ":"))
    except (ValueError, RecursionError):  # a tree that was hung into itself
        return None
    return changed.removesuffix(closing).encode() if closing else changed.encode()


def _change(parent: Any, key: Any, *, nodes: list[tuple[Any, Any]], chance: random.Random) -> None:
    way = chance.randrange(6)
    if way == 0:
        del parent[key]
    elif way == 1 and isinstance(parent, dict):
        parent[chance.choice([value for value in _VALUES if isinstance(value, str)])] = parent.pop(key)
    elif way == 2:
        donor, place = chance.choice(nodes)
        if isinstance(donor, dict) and place in donor:
            parent[key] = donor[place]
    elif way == 3 and type(parent[key]) is int:
        parent[key] += chance.choice((-1, 1, 8, -4096, 1 << 32))
    elif way == 4 and isinstance(parent, list):
        parent.insert(chance.randrange(len(parent) + 1), chance.choice(_VALUES))
    else:
        parent[key] = chance.choice(_VALUES)


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a tree, as its container and its key."""
    places, queue = [], [value] if isinstance(value, dict | list) else []
    while queue:
        parent = queue.pop()
        keys: Any = parent.keys() if isinstance(parent, dict) else range(len(parent))
        for key in keys:
            places.append((parent, key))
            if isinstance(parent[key], dict | list):
                queue.append(parent[key])
    return places
