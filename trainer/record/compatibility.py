"""Rules for differences between a checkpoint and the loading run, by field. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from reprise.errors import MismatchError
from reprise.json_file import Json

_MOST_CHARACTERS = 500  # of a value in a message; a file may hold any


class Verdict(Enum):
    """The consequence of a difference."""

    REFUSED = "refused"
    FLAG = "allowed with a flag"
    LOGGED = "logged"


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule for a field of `trainer_state.json`, or for all fields below it.

    Args:
        field: a dotted path; a rule for a longer path wins.
        flag: the flag to allow the difference, for Verdict.FLAG.
        says: the effect of an allowed difference, for the log line.
        hint: advice for the refusal or, with Verdict.LOGGED, for the log line; `{saved}` in it is replaced by the saved
            value.
        is_optional: whether a field may be missing on a side; older checkpoints lack it.
    """

    field: str
    verdict: Verdict
    flag: str = ""
    says: str = ""
    hint: str = ""
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """A field with different values, and its rule."""

    field: str
    saved: object
    current: object
    rule: Rule


def differences(saved: Json, current: Json, table: Sequence[Rule]) -> list[Difference]:
    """Return every differing field with a rule in `table`, in order of the table."""
    old, new = flattened(saved), flattened(current)
    differing = []
    for field in sorted(old.keys() | new.keys()):
        rule = rule_for(field, table)
        if rule is None or (rule.is_optional and not (field in old and field in new)):
            continue
        if old.get(field) != new.get(field):
            differing.append(Difference(field, old.get(field), new.get(field), rule))
    return sorted(differing, key=lambda d: table.index(d.rule))


def flattened(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return all values of nested objects by their dotted paths."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def settle(
    differing: Sequence[Difference],
    *,
    flags: Collection[str],
    where: object,
    problem: str = "The checkpoint belongs to another run",
    fix: str = "Use the saved values, or start another run with checkpoint.load=none.",
    otherwise: str = "",
) -> list[str]:
    """Return the lines to log about allowed differences.

    Args:
        fix: what to do about differences without a flag to allow them.
        otherwise: what can be done about any difference.

    Raises:
        MismatchError: listing every difference refused or without its flag, with both values and the flag.
    """
    refused = [
        d
        for d in differing
        if d.rule.verdict is Verdict.REFUSED or (d.rule.verdict is Verdict.FLAG and d.rule.flag not in flags)
    ]
    if refused:
        width = max(len(d.field) for d in refused)
        rows = [
            f"  {d.field:<{width}}  saved {_text(d.saved)}  current {_text(d.current)}{_advice(d)}" for d in refused
        ]
        flag_list = sorted({d.rule.flag for d in refused if d.rule.verdict is Verdict.FLAG})
        fixable = all(d.rule.verdict is Verdict.FLAG for d in refused)
        if fixable:
            fix = f"To continue anyway, set {' '.join(f'{flag}=true' for flag in flag_list)}."
        raise MismatchError(
            problem,
            where=where,
            found="these differences:\n" + "\n".join(rows),
            fix="\n".join(["", fix, *([otherwise] if otherwise else [])]),
        )
    return [_line(d) for d in differing]


def _line(difference: Difference) -> str:
    rule = difference.rule
    parts = [rule.says, *(_hint(difference) if rule.verdict is Verdict.LOGGED else [])]
    return f"{difference.field}: saved {_text(difference.saved)}, now {_text(difference.current)}; {'; '.join(parts)}"


def _hint(difference: Difference) -> list[str]:
    hint = difference.rule.hint
    has_value = difference.saved is not None or "{saved}" not in hint  # there is no way to set "nothing"
    return [hint.replace("{saved}", _text(difference.saved))] if hint and has_value else []


def _advice(difference: Difference) -> str:
    rule, parts = difference.rule, _hint(difference)
    if rule.verdict is Verdict.FLAG:
        parts.append(f"{rule.flag}=true allows it")
    return f"  ({'; '.join(parts)})" if parts else ""


def rule_for(field: str, table: Sequence[Rule]) -> Rule | None:
    """Return the rule for a dotted path: the longest path above it wins."""
    fitting = [rule for rule in table if field == rule.field or field.startswith(rule.field + ".")]
    return max(fitting, key=lambda rule: len(rule.field), default=None)


def _text(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."
