"""Formats of training logs: how their lines and columns look, and what their numbers mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

# An integer, with or without thousands separators.
COUNT = r"\d{1,3}(?:,\d{3})+(?!\d)|\d+"
# Times logged beside a curve's quantities: milliseconds per iteration, and clock seconds at the log line.
ELAPSED, CLOCK = "elapsed", "clock"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a log's losses mean.

    Args:
        program: The program writing the log.
        is_mean: Whether each loss averages the iterations since the previous line. None for a tracker's export, which
            holds whatever the program logged.
        first: The first iteration's number.
        share: The part of the batch covered by the loss.
        single: The setting with which the program logs every iteration.
    """

    program: str = ""
    is_mean: bool | None = False
    first: int = 1
    share: str = "the whole batch"
    single: str = ""

    def describe(self, window: int) -> str:
        """Describe the meaning, if each loss averages `window` iterations."""
        if self.is_mean is None:
            return f"{self.program}: as its program logged it"
        number = f"mean of {window} iterations" if window > 1 else "each iteration's"
        counted = f", counted from {self.first}" if self.first != 1 else ""
        return f"{self.program}: {number}, of {self.share}{counted}"


@dataclass(frozen=True)
class LineForm:
    """How a program formats its training lines.

    Args:
        example: An example for messages.
        head: Matches a line up to its fields. COUNT stands for the iteration.
        separator: Separates fields.
        labels: Regular expressions for the text before each number, by quantity.
    """

    meaning: Meaning
    example: str
    head: str
    separator: str
    labels: dict[str, str]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches a line: its iteration, and its fields."""
        return re.compile(rf"{self.head.replace('COUNT', f'({COUNT})')}([^\n]*)", re.IGNORECASE | re.MULTILINE)

    @cached_property
    def fields(self) -> dict[str, re.Pattern[str]]:
        """Patterns for a field, by quantity."""
        field = rf"(?:\A|{self.separator})\s*(?:%s)\s*([^\s|(]+)"
        return {quantity: re.compile(field % label, re.IGNORECASE) for quantity, label in self.labels.items()}


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """The columns in a table or in JSON objects.

    Args:
        example: An example for messages.
        columns: Regular expressions for column names, by quantity and for `iteration`. The first matching alternative
            counts.
        beside: Regular expressions for other required names.
    """

    meaning: Meaning
    example: str
    columns: dict[str, str]
    beside: tuple[str, ...] = ()

    def find(self, names: list[str]) -> dict[str, list[str]] | None:
        """Return the matching names per quantity, or None if the table has another form."""
        columns = {quantity: _matching(pattern, names) for quantity, pattern in self.columns.items()}
        needs = [columns["iteration"], columns["loss"], *(_matching(pattern, names) for pattern in self.beside)]
        return columns if all(needs) else None


def _matching(pattern: str, names: list[str]) -> list[str]:
    """Return the names matching the first alternative in `pattern` that matches any name."""
    for alternative in pattern.split("|"):
        if matches := [name for name in names if re.fullmatch(alternative, name.strip(), re.IGNORECASE)]:
            return matches
    return []


OURS = Meaning("metrics.jsonl")
_STEP, _LOSS = r"step|iteration|iter|(?:.*/)?global_step", r"(?:train[/_ ])?(?:lm[ _])?loss(?:_step)?(?:/train)?"
_RATES = {"grad_norm": "grad_norm", "lr": "lr|learning_rate"}

LINE_FORMS = (
    LineForm(
        Meaning("step lines"),
        "step 1/100 | train loss 4.2 |",
        r"\bstep\s+COUNT\s*/\s*[\d,.]+\s*\|",
        r"\|",
        {"loss": r"(?:(?:train|lm)\s+)?loss:?\s", "grad_norm": r"(?:grad\s+)?norm:?\s", "lr": r"lr:?\s"},
    ),
    LineForm(
        Meaning("Megatron or GPT-NeoX", is_mean=True, single="--log-interval 1 or log_interval: 1"),
        " iteration 10/ 100 | lm loss: 4.2E+00 |",
        r"\biteration\s+COUNT\s*/\s*[\d,.]+\s*\|",
        r"\|",
        {
            "loss": r"(?:(?:train|lm)[ _])?loss:",
            "grad_norm": "grad norm:",
            "lr": "learning rate:",
            ELAPSED: r"elapsed time per iteration \(ms\):",
        },
    ),
    LineForm(
        Meaning("nanoGPT", first=0, share="the last micro batch of rank 0"),
        "iter 10: loss 4.2,",
        r"\biter\s+COUNT:",
        ",",
        {"loss": r"loss\s"},
    ),
    LineForm(
        Meaning("llm.c", first=0),
        "s:9 trl:4.2",
        r"^s:COUNT\s+(?=trl:)",
        r"\s",
        {"loss": "trl:", "grad_norm": "norm:", "lr": "lr:"},
    ),
    LineForm(
        Meaning("torchtitan"),
        "step:  1  loss:  4.2",
        r"(?<!validate )\bstep:\s+COUNT\s",
        r"\s",
        {"loss": "loss:", "grad_norm": "grad_norm:"},
    ),
)

COLUMN_FORMS = (
    ColumnForm(
        Meaning("TensorBoard", is_mean=None),
        "event files of TensorBoard, or their folder",
        {"iteration": "step", "loss": rf"{_LOSS}|.*/global_avg_loss", CLOCK: "wall_time"}
        | {"grad_norm": "(?:.*/)?grad_norm", "lr": "(?:.*/)?lr|(?:.*/)?learning_rate"},
        beside=("wall_time",),
    ),
    ColumnForm(
        Meaning("HF Trainer", is_mean=True, single="logging_steps=1"),
        "trainer_state.json (HF Trainer)",
        {"iteration": "step", "loss": "loss", **_RATES},
        beside=("epoch", "learning_rate"),
    ),
    ColumnForm(
        Meaning("W&B", is_mean=None),
        "a CSV or JSON export of W&B",
        {"iteration": r"(?:.*/)?global_step|step|_step", "loss": rf"(?:.* - )?{_LOSS}|.*/global_avg_loss", **_RATES}
        | {CLOCK: "_timestamp|_runtime"},
        beside=("_step|.* - .*",),
    ),
    ColumnForm(
        Meaning("Lightning", first=0, share="rank 0's batch (without sync_dist)"),
        "metrics.csv (Lightning)",
        {"iteration": "step", "loss": _LOSS, "lr": "lr.*"},
        beside=("epoch",),
    ),
    ColumnForm(
        Meaning("table", is_mean=None),
        "a table with the columns step and loss",
        {"iteration": _STEP, "loss": _LOSS, **_RATES},
    ),
)  # fmt: skip


def column_form_of(names: list[str]) -> tuple[Meaning, dict[str, list[str]]] | None:
    """Return a table's loss meaning and the names per quantity, or None if its form is unknown."""
    forms = ((form.meaning, form.find(names)) for form in COLUMN_FORMS)
    return next(((meaning, columns) for meaning, columns in forms if columns), None)


FORMATS = (
    f"metrics.jsonl records with iteration and loss, {', '.join(f'`{form.example}`' for form in LINE_FORMS)}, "
    f"{', '.join(form.example for form in COLUMN_FORMS)}"
)
