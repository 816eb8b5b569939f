"""Rules for differences between a run and its loaded checkpoint's record. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from reprise.errors import MismatchError
from reprise.storage import Json, integer
from trainer.config.checkpoint import FLAGS, Allowed, CheckpointSection
from trainer.config.parallel import INVARIANT
from trainer.config.saved import PARALLEL_KEYS, flattened
from trainer.optim.table import OPTIMIZERS, SECTIONS
from trainer.record.data_origin import reading_state
from trainer.schedules.batch_size import BatchSchedule, parse_batch_schedule
from trainer.schedules.lr import COUNTS, DecayStyle

ASSUMED = "assumed"
_MOST_CHARACTERS = 500  # for a value in a message; a file may hold more


class Verdict(Enum):
    """The consequence of a difference that no flag allows."""

    REFUSED = "refused"
    LOGGED = "logged"


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule for a field in `trainer_state.json`, or for all fields below it.

    Args:
        field: A dotted path. A rule for a longer path wins.
        verdict: The consequence, or the `checkpoint.allow` value without which the difference is refused.
        says: An allowed difference's effect, for the log line.
        hint: Advice for the refusal or, with Verdict.LOGGED, for the log line. `{saved}` in it is replaced by the saved
            value.
        is_optional: Whether either side may lack the field, as older checkpoints do.
    """

    field: str
    verdict: Verdict | Allowed
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


_ROUNDING = "weights and moments stay bitwise, the loss curve equals within rounding"
_LOSSES = "checkpoint.keep_best and the best loss compare validation losses measured differently"
_MASKS = f"{_ROUNDING}, except that dropout draws other masks"
_MASKS_HINT = "within rounding, other dropout masks"
_KERNELS = f"{_ROUNDING}: sums and products take the kernels of the processor"
_OTHER_CURVE = "the loss curve will differ"
_COARSER = "weights and moments stay bitwise, matrix products are rounded to another precision"
_CONVERTED = "loaded moments are converted, and the loss curve will differ"
_SAME_BITS = "weights and moments stay bitwise, and so does the loss curve: same bits"

_LENGTH = "the position follows the consumed tokens, and all counts are in samples of this length"
_EXTENDS = "keeps the saved schedule, which stays at schedule.min_lr"
# Counts that follow other keys while unset, and the effect of setting them to their saved values.
_KEPT_COUNTS = {"decay_iters": _EXTENDS, "decay_samples": _EXTENDS, "warmup_samples": "keeps the saved warm-up"}
_ROWS = "checkpoint.resize keeps the rows of its tables by number"
TABLE_SIZES = ("vocab_size", "max_position_embeddings")  # model fields that set only the row counts of its tables

RULES: tuple[Rule, ...] = (
    Rule("model", Verdict.REFUSED),
    Rule("model.activation", Verdict.REFUSED, hint="absent means gelu_tanh"),
    Rule("model.lora.rank", Verdict.REFUSED, hint="checkpoint.base takes the weights beneath adapters"),
    Rule("model.lora.dropout", Allowed.dropout, _OTHER_CURVE),
    Rule("model.lora.target_modules", Verdict.REFUSED, hint="null means the family's default"),
    Rule("base", Verdict.REFUSED, hint="adapters fit the base that they were trained on: set checkpoint.base to it"),
    Rule("model.dropout", Allowed.dropout, _OTHER_CURVE),
    Rule("model.initializer_range", Verdict.LOGGED, says="it affects only the start of a run"),
    Rule("model.pad_vocab_multiple", Verdict.LOGGED, says=_ROUNDING),
    Rule("model.stop_token_ids", Verdict.LOGGED, says="it affects only where a generated text ends"),
    Rule("topology", Allowed.topology, _ROUNDING, hint="within rounding"),
    *(
        Rule(f"topology.{name}", Allowed.topology, _MASKS, _MASKS_HINT)
        for name in ("tp", "sp", "invariant_tensor_ranks")
    ),
    Rule("topology.invariant_ranks", Verdict.LOGGED, says=f"{_ROUNDING}: gradients are added in another order"),
    Rule("batch", Allowed.batch, "the run continues with other batches"),
    Rule("batch.seq_length", Allowed.batch, _LENGTH),
    Rule("batch.micro_batch_size", Allowed.topology, _MASKS, _MASKS_HINT, is_optional=True),
    Rule("data", Allowed.data, "the run continues with other samples"),
    Rule(
        "data.fingerprint",
        Allowed.data,
        says="the run continues with other samples, at its own position unless data.position=start",
        hint="data.position=start reads a new source from its first sample",
    ),
    Rule("data.weights", Allowed.data, "every source continues at its consumed count"),
    Rule("data.document_mask", Allowed.data, _OTHER_CURVE),
    Rule("data.documents", Allowed.data, _OTHER_CURVE, is_optional=True),
    Rule(
        "data.micro_batch_size",
        Allowed.data,
        says=_OTHER_CURVE,
        hint="the loss is the mean over the targets of each micro batch",
    ),
    Rule("data.valid_fingerprint", Verdict.LOGGED, says=_LOSSES, is_optional=True),
    Rule("evaluation", Verdict.LOGGED, says=_LOSSES, is_optional=True),
    Rule(
        "seed",
        Allowed.data,
        says="the run continues with other samples and other dropout masks",
        hint="it determines the order of the samples and the dropout masks",
    ),
    Rule("schedule", Allowed.lr, _OTHER_CURVE),
    *(
        Rule(
            f"schedule.{name}",
            Allowed.lr,
            says=_OTHER_CURVE,
            hint=f"schedule.lr_{name}={{saved}} {effect}",
        )
        for name, effect in _KEPT_COUNTS.items()
    ),
    Rule("ema_decay", Verdict.LOGGED, "the moving average takes the new decay, starts from the weights, or is dropped"),
    Rule("clip_grad", Allowed.lr, _OTHER_CURVE, is_optional=True),
    *(Rule(name, Allowed.lr, _OTHER_CURVE) for name in SECTIONS),
    Rule(
        "freeze",
        Allowed.freeze,
        says="newly trained parameters start with zero moments, the moments of frozen parameters are dropped",
    ),
    Rule("optimizer", Verdict.REFUSED),
    Rule("optimizer.weight_decay", Allowed.lr, _OTHER_CURVE),
    Rule("optimizer.moments_dtype", Allowed.dtype, _CONVERTED),
    Rule("precision", Allowed.dtype, _COARSER, is_optional=True),
    Rule("environment", Verdict.LOGGED, says=_ROUNDING),
    Rule(
        "environment.threads",
        Verdict.LOGGED,
        says=f"{_ROUNDING}: sums of a matrix product on a CPU depend on the number of threads",
        hint="train.threads={saved} keeps the bits of these sums",
    ),
    *(Rule(f"environment.{name}", Verdict.LOGGED, _KERNELS, is_optional=True) for name in ("processor", "math")),
    Rule("environment.math.float32_products", Allowed.dtype, _COARSER, is_optional=True),
)

# The keys that set a record's fields. Other fields have their key's name, or no key.
_KEYS = {
    **dict.fromkeys(("batch", "evaluation", "precision"), "train"),
    **{name: f"train.{name}" for name in ("seed", "clip_grad", "ema_decay", "freeze")},
    **{f"environment.{name}": f"train.{name}" for name in ("threads", "compile", "activation_checkpointing")},
    **{f"topology.{name}": f"parallel.{key}" for name, key in PARALLEL_KEYS.items()},
    **{f"schedule.{name}_{unit}": f"schedule.lr_{name}_{unit}" for name in COUNTS for unit in ("iters", "samples")},
    "schedule.style": "schedule.lr_decay_style",
    "schedule.lr": "optimizer.lr",
    "data.micro_batch_size": "train.micro_batch_size",
    "data.valid_fingerprint": "data.valid",
    "data.weights": "data.train",
    **{
        f"{section}.{name}": f"optimizer.{key}"
        for spec in OPTIMIZERS.values()
        for section, keys in spec.numbers.items()
        for name, key in keys.items()
    },
}
# With `parallel.invariant_ranks`, an iteration's bits do not depend on these.
_BITWISE_FIELDS = frozenset(f"topology.{name}" for name in ("world_size", "dp", "pp", "vpp", "zero_stage", "replicate"))
# With `parallel.invariant_tensor_ranks`, nor on these.
_BITWISE_TENSOR_FIELDS = frozenset({"topology.tp", "topology.sp"})
# Iterations do not depend on these rules' fields.
_OUTSIDE_ITERATIONS = frozenset({"model.initializer_range", "data.valid_fingerprint", "evaluation", "ema_decay"})


def rules_for(section: CheckpointSection) -> Sequence[Rule]:
    """Return the effective rules. A fine-tuning run shares only the model and the adapters' base."""
    if section.finetune:
        names = TABLE_SIZES if section.resize else ()
        return [*weight_rules(), *(Rule(f"model.{name}", Verdict.LOGGED, says=_ROWS) for name in names)]
    return RULES


def weight_rules() -> list[Rule]:
    """Return the rules for a run started from weights only: its loss curve is its own, and needs no flag."""
    rules = [rule for rule in RULES if rule.field.startswith(("model", "base"))]
    return [replace(rule, verdict=Verdict.LOGGED) if rule.verdict in FLAGS else rule for rule in rules]


def compared(saved: Json, current: Json, *, where: object) -> tuple[Json, Json]:
    """Return two states in comparable form.

    The optimizer's groups are replaced by whether each parameter in both states has weight decay; the value is in
    `adam`. An optimizer member missing in the saved state is removed from both, but a missing `moments_dtype` means
    float32. Other `freeze` patterns for the same trained parameters make no difference. A missing `invariant_ranks` or
    `invariant_tensor_ranks` means 0, and a missing `replicate` means 1. Saved sample counts are converted to the
    current sequence length. Without a decay, its length and the minimum rate are removed.

    Raises:
        CheckpointError: The saved state is malformed.
    """
    with reading_state("record of its settings", where):
        states = [_in_use(state) for state in (in_samples_of(current["batch"]["seq_length"], saved), current)]
        tables = [state.get("optimizer", {}) for state in states]
        for state, table in zip(states, tables, strict=True):
            state["optimizer"] = {"moments_dtype": table.get("moments_dtype", "float32")}
            if "name" in tables[0]:
                state["optimizer"]["name"] = table["name"]
        if "groups" in tables[0]:
            decays = [_decays(table["groups"]) for table in tables]
            common = decays[0].keys() & decays[1].keys()
            for state, decay in zip(states, decays, strict=True):
                state["optimizer"]["weight_decay"] = {name: decay[name] for name in common}
                if decays[0].keys() == decays[1].keys():
                    state.pop("freeze", None)
    return states[0], states[1]


def _in_use(state: Json) -> Json:
    """Return a state with the schedule's effective members, and a complete topology."""
    schedule, topology = state.get("schedule", {}), state.get("topology", {})
    if schedule.get("style") == DecayStyle.constant.value:
        schedule = {name: value for name, value in schedule.items() if name != "min_lr" and "decay" not in name}
    return {**state, "schedule": schedule, "topology": {**dict.fromkeys(INVARIANT, 0), "replicate": 1, **topology}}


def _decays(groups: Sequence[Json]) -> dict[str, bool]:
    """Return whether each parameter has weight decay, as only the first group has."""
    return {name: number == 0 for number, group in enumerate(groups) for name in group["names"]}


def in_samples_of(seq_length: int, saved: Json) -> Json:
    """Return a state whose schedules count samples with `seq_length` tokens, as a resumed run's position does.

    Counts are rounded down, like the position. Iteration counts stay as they are.

    Args:
        saved: The content of `trainer_state.json`.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: The state is malformed.
    """
    batch, schedule = saved.get("batch", {}), saved.get("schedule", {})
    was = integer(batch.get("seq_length", seq_length))
    if was == seq_length:
        return saved
    schedule = {
        name: integer(value) * was // seq_length if name.endswith("_samples") else value
        for name, value in schedule.items()
    }
    if "batch_schedule" in batch:
        steps = parse_batch_schedule(batch["batch_schedule"]).steps
        converted = BatchSchedule(tuple((first * was // seq_length, size) for first, size in steps))
        batch = {**batch, "batch_schedule": str(converted)}
    return {**saved, "batch": batch, "schedule": schedule}


def differences(saved: Json, current: Json, table: Sequence[Rule]) -> list[Difference]:
    """Return every differing field with a rule in `table`, in table order."""
    old, new, assumed = flattened(saved), flattened(current), assumed_in(saved)
    differing = []
    for field in sorted(old.keys() | new.keys()):
        rule = rule_for(field, table)
        if (
            f"{field}.".startswith(assumed)
            or rule is None
            or (rule.is_optional and not (field in old and field in new))
        ):
            continue
        if old.get(field) != new.get(field):
            differing.append(Difference(field, old.get(field), new.get(field), rule))
    return sorted(differing, key=lambda d: table.index(d.rule))


def with_same_bits(differing: list[Difference], saved: Json, current: Json) -> list[Difference]:
    """Return the differences, with "same bits" as a topology change's effect if the loss curve keeps its bits.

    It does if `invariant_ranks` is on and all other influences on an iteration are known and equal, on both sides and
    on all ranks. Tests prove it on CPUs, so a run on another device does not get this message.

    Args:
        differing: The differences between the states.
        saved: The checkpoint's state, as `compared`.
        current: The run's own state, as `compared`.
    """
    topology, environment = current["topology"], flattened(current["environment"])
    bitwise_fields = _BITWISE_FIELDS | (_BITWISE_TENSOR_FIELDS if topology["invariant_tensor_ranks"] else frozenset())
    strict = [replace(rule, is_optional=False) for rule in RULES]  # what is not known may differ
    strict_fields = {d.field for d in differences(saved, current, strict) if d.rule.field not in _OUTSIDE_ITERATIONS}
    is_mixed = any(isinstance(value, list) for value in environment.values())
    is_promised = topology["invariant_ranks"] and environment["device"] == "cpu" and not is_mixed
    if not is_promised or assumed_in(saved) or not strict_fields <= bitwise_fields:
        return differing
    same = {d.field: replace(d.rule, says=_SAME_BITS, hint="same bits") for d in differing if d.field in bitwise_fields}
    return [replace(d, rule=same.get(d.field, d.rule)) for d in differing]


def assumed_in(state: Json) -> tuple[str, ...]:
    """Return prefixes for fields an imported state assumed because its source lacked them. They are not compared."""
    return tuple(f"{field}." for field in state.get(ASSUMED, ()))


def settle(
    differing: Sequence[Difference],
    *,
    where: object,
    allowed: Collection[Allowed] = (),
    problem: str = "This command differs from the run that it resumes",
    fix: str = "Use the saved values, or start another run with checkpoint.load=none.",
) -> list[str]:
    """Raise for refused differences, and return log lines about the allowed ones.

    Args:
        differing: The differences, with their rules.
        where: The place to name in the error.
        allowed: The allowed differences.
        problem: The error's first sentence.
        fix: Advice on differences that no flag allows.

    Raises:
        MismatchError: A difference is refused, or its flag is not set. The message lists each by key, with both values
            and the flag.
    """
    refused = [d for d in differing if d.rule.verdict not in (Verdict.LOGGED, *allowed)]
    if refused:
        width = max(len(key_of(d.field)) for d in refused)
        rows = [
            f"  {key_of(d.field):<{width}}  saved {_text(d.saved)}  current {_text(d.current)}{_advice(d)}"
            for d in refused
        ]
        verdicts = {d.rule.verdict for d in refused}
        names = [allowance.value for allowance in FLAGS if allowance in {*allowed, *verdicts}]
        words = f"checkpoint.allow={','.join(names)}"
        if Verdict.REFUSED not in verdicts:
            fix = f"To continue anyway, set {words}."
        elif len(verdicts) > 1:
            fix += f" The others need {words}."
        raise MismatchError(
            problem,
            where=where,
            found="these differences:\n" + "\n".join(rows),
            fix=f"\n{fix}",
        )
    return [_line(d) for d in differing]


def _line(difference: Difference) -> str:
    rule = difference.rule
    parts = [rule.says, *(_hint(difference) if rule.verdict is Verdict.LOGGED else [])]
    values = f"saved {_text(difference.saved)}, now {_text(difference.current)}"
    return f"{key_of(difference.field)}: {values}; {'; '.join(parts)}"


def _hint(difference: Difference) -> list[str]:
    hint = difference.rule.hint
    has_value = difference.saved is not None or "{saved}" not in hint  # there is no way to set "nothing"
    return [hint.replace("{saved}", _text(difference.saved))] if hint and has_value else []


def _advice(difference: Difference) -> str:
    verdict, parts = difference.rule.verdict, _hint(difference)
    if isinstance(verdict, Allowed):
        parts.append(f"checkpoint.{FLAGS[verdict]}=true allows it")
    return f"  ({'; '.join(parts)})" if parts else ""


def key_of(field: str) -> str:
    """Return the key that sets a field, or the field itself if no single key sets it alone."""
    section, _, name = field.partition(".")
    return _KEYS.get(field) or (f"{_KEYS[section]}.{name}" if name and section in _KEYS else field)


def rule_for(field: str, table: Sequence[Rule]) -> Rule | None:
    """Return the rule for a dotted path. The longest matching path wins."""
    fitting = [rule for rule in table if field == rule.field or field.startswith(rule.field + ".")]
    return max(fitting, key=lambda rule: len(rule.field), default=None)


def _text(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."
