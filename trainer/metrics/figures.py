"""Names the figures in a `metrics.jsonl` record for TensorBoard and trackers."""

from __future__ import annotations

from functools import cache

from reprise.storage import Json
from trainer.metrics.json_lines import DECIMAL, EXACT, value_of

# The prefix for figure names by event, and other names for some figures.
_GROUPS = {"": "train", "evaluation": "valid"}
_NAMES = {"valid/valid_loss": "valid/loss", "train/checkpoint_seconds": "checkpoint/blocked_seconds"}
_LEFT_OUT = ("iteration", "event", "time")


def figures_of(record: Json) -> tuple[dict[str, float | int], dict[str, str]]:
    """Return a record's numbers by name, such as `train/loss`, and its texts by name."""
    event = str(record.get("event", ""))
    group = _GROUPS.get(event, event)
    figures, texts = dict[str, float | int](), dict[str, str]()
    for name, value in record.items():
        label = _label(group, name)
        if not label:
            continue
        if type(value) is float:  # the usual case: decimals in a record keep all bits
            figures[label] = value
        elif isinstance(value, bool):
            figures[label] = int(value)
        elif isinstance(value, str):
            texts[label] = value
        elif (pair := value_of(record, name))[1] in (DECIMAL, EXACT):
            figures[label] = value if type(value) is int else pair[0]
    return figures, texts


@cache  # a run has few names, and an iteration names them all
def _label(group: str, name: str) -> str:
    """Return a figure's name, or an empty one for a member that is no figure."""
    if name in _LEFT_OUT or name.endswith("_hex"):
        return ""
    return _NAMES.get(f"{group}/{name}", f"{group}/{name}")
