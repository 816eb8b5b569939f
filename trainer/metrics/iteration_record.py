"""The figures of one iteration, as `metrics.jsonl` and TensorBoard have them. Pure."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any


def _figure(
    tag: str | None = None,
    *,
    name: str | None = None,
    digits: int | None = None,
    has_bits: bool = False,
    is_recorded: bool = True,
    init: bool = True,
    default: Any = MISSING,
) -> Any:
    """Return a field of `IterationRecord`; where it has its default, the line leaves it out.

    Args:
        tag: its name in TensorBoard; None leaves it out there.
        name: its name in the line where that is another one.
        digits: how many decimals the line has of it; None for all.
        has_bits: whether its hex form stands beside it as `<name>_hex`; it is null where JSON lacks the number.
        is_recorded: whether the line has it at all.
    """
    shown = {"tag": tag, "name": name, "digits": digits, "has_bits": has_bits, "is_recorded": is_recorded}
    return field(default=default, init=init, metadata=shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """The figures of one iteration: a field here is a member of its line in `metrics.jsonl` and a tag of TensorBoard.

    `checkpoint_seconds` is how long saving held the iteration back, or its beginning, beside `seconds`. With
    `is_skipped`, loss or gradients were not finite, and the parameters stayed as they were.
    """

    iteration: int = _figure()
    loss: float = _figure("train/loss", has_bits=True)
    grad_norm: float = _figure("train/grad_norm", has_bits=True)
    lr: float = _figure("train/lr", has_bits=True)
    consumed_samples: int = _figure()
    tokens: int = _figure(is_recorded=False)
    tokens_per_second: float = _figure("train/tokens_per_second", digits=1, init=False)
    seconds: float = _figure(digits=6)
    checkpoint_seconds: float = _figure("checkpoint/blocked_seconds", digits=6)
    is_skipped: bool = _figure(name="skipped", default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_per_second", self.tokens / self.seconds)

    def line(self) -> dict[str, object]:
        """Return the members of its line in `metrics.jsonl`."""
        members: dict[str, object] = {}
        for figure in fields(self):
            shown, value = figure.metadata, getattr(self, figure.name)
            if not shown["is_recorded"] or value == figure.default:
                continue
            name = shown["name"] or figure.name
            members[name] = value if shown["digits"] is None else round(value, shown["digits"])
            if shown["has_bits"]:
                members |= {name: finite_or_none(value), f"{name}_hex": value.hex()}
        return members

    def scalars(self) -> dict[str, float]:
        """Return its points in TensorBoard by tag."""
        tags = {figure.name: figure.metadata["tag"] for figure in fields(self)}
        return {tag: getattr(self, name) for name, tag in tags.items() if tag is not None}


def finite_or_none(value: float) -> float | None:
    """Return a number that JSON has, or None."""
    return value if math.isfinite(value) else None
