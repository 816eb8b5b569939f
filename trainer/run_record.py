"""The contents of `trainer_state.json`, and the rules for a run that differs from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from enum import Enum
from fractions import Fraction
from types import UnionType
from typing import Any, get_args, get_origin

from models.adapters import adapter_problems, is_adapted
from models.config import ADDED, Activation, Family, LoraConfig, ModelConfig, RopeScaling
from models.families import problems
from trainer.checkpoint.format.json_file import Json
from trainer.checkpoint.format.names import FORMAT
from trainer.compatibility import Difference, Rule, Verdict
from trainer.config.frozen import frozen_names
from trainer.config.schema import CheckpointSection, Config, OptimizerSection, batch_schedule_of
from trainer.data.documents import DocumentMarks
from trainer.data_origin import data_record
from trainer.errors import CheckpointError
from trainer.json_value import finite_number, integer
from trainer.optimizers import OPTIMIZERS, SECTIONS, optimizer_record, settings_record
from trainer.progress import Progress
from trainer.sample_counts import in_samples_of
from trainer.schedule import COUNTS, DecayStyle, Schedule
from trainer.topology import Topology

_ROUNDING = "weights and moments stay bitwise, the loss curve equals within rounding"
_LOSSES = "checkpoint.keep_best and the best loss compare validation losses that are not measured alike"
_MASKS = f"{_ROUNDING}, except that dropout draws other masks"
_SAME_BITS = "weights and moments stay bitwise, and so does the loss curve: same bits"

_LENGTH = "the position is that of the tokens consumed, and all counts are of samples of this length"
_EXTENDS = "extends the run on the saved schedule"
# Counts that follow other keys where they are not set, and what it does to set them to the saved ones.
_KEPT_COUNTS = {"decay_iters": _EXTENDS, "decay_samples": _EXTENDS, "warmup_samples": "keeps the saved warm-up"}
_PARTS = "only the weights of checkpoint.partial are loaded"
_ROWS = "checkpoint.resize keeps the rows of its tables by number"
_SIZES = ("vocab_size", "max_position_embeddings")

RULES: tuple[Rule, ...] = (
    Rule("model", Verdict.REFUSED),
    Rule("model.activation", Verdict.REFUSED, hint="absent means gelu_tanh"),
    Rule("model.lora.rank", Verdict.REFUSED, hint="checkpoint.base takes the weights beneath adapters"),
    Rule("model.lora.dropout", Verdict.LOGGED, says="the loss curve will differ"),
    Rule("model.lora.target_modules", Verdict.REFUSED, hint="null means the family's default"),
    Rule("base", Verdict.REFUSED, hint="adapters fit the base that they were trained on: set checkpoint.base to it"),
    Rule("model.dropout", Verdict.LOGGED, says="the loss curve will differ"),
    Rule("model.initializer_range", Verdict.LOGGED, says="it affects only the start of a run"),
    Rule("model.pad_vocab_multiple", Verdict.LOGGED, says=_ROUNDING),
    Rule("topology", Verdict.FLAG, "checkpoint.reshard", _ROUNDING, hint="within rounding"),
    Rule("topology.tp", Verdict.FLAG, "checkpoint.reshard", _MASKS, hint="within rounding, other dropout masks"),
    Rule("topology.sp", Verdict.FLAG, "checkpoint.reshard", _MASKS, hint="within rounding, other dropout masks"),
    Rule("topology.invariant_ranks", Verdict.LOGGED, says=f"{_ROUNDING}: gradients are added in another order"),
    Rule("batch", Verdict.FLAG, "checkpoint.override_batch_size", "the run continues with other batches"),
    Rule("batch.seq_length", Verdict.FLAG, "checkpoint.override_batch_size", _LENGTH),
    Rule("batch.micro_batch_size", Verdict.LOGGED, says=_MASKS),
    Rule("data", Verdict.FLAG, "checkpoint.override_data", "the run continues with other samples"),
    Rule("data.weights", Verdict.FLAG, "checkpoint.override_data", "every source goes on at its consumed count"),
    Rule("data.document_mask", Verdict.FLAG, "checkpoint.override_data", "the loss curve will differ"),
    Rule("data.documents", Verdict.FLAG, "checkpoint.override_data", "the loss curve will differ", is_optional=True),
    Rule(
        "data.micro_batch_size",
        Verdict.FLAG,
        "checkpoint.override_data",
        says="the loss curve will differ",
        hint="the loss is the mean over the targets of each micro batch",
    ),
    Rule("data.valid_fingerprint", Verdict.LOGGED, says=_LOSSES, is_optional=True),
    Rule("evaluation", Verdict.LOGGED, says=_LOSSES, is_optional=True),
    Rule(
        "seed",
        Verdict.FLAG,
        "checkpoint.override_data",
        says="the run continues with other samples and other dropout masks",
        hint="it determines the order of the samples and the dropout masks",
    ),
    Rule("schedule", Verdict.FLAG, "checkpoint.override_scheduler", "the loss curve will differ"),
    *(
        Rule(
            f"schedule.{name}",
            Verdict.FLAG,
            "checkpoint.override_scheduler",
            says="the loss curve will differ",
            hint=f"schedule.lr_{name}={{saved}} {effect}",
        )
        for name, effect in _KEPT_COUNTS.items()
    ),
    Rule("clip_grad", Verdict.LOGGED, says="the loss curve will differ", is_optional=True),
    *(Rule(name, Verdict.FLAG, "checkpoint.override_scheduler", "the loss curve will differ") for name in SECTIONS),
    Rule(
        "freeze",
        Verdict.FLAG,
        "checkpoint.override_freeze",
        says="parameters that are trained from now on begin with zero moments, the moments of frozen ones are dropped",
    ),
    Rule("optimizer", Verdict.REFUSED),
    Rule("optimizer.weight_decay", Verdict.FLAG, "checkpoint.override_scheduler", "the loss curve will differ"),
    Rule("precision", Verdict.LOGGED, says=_ROUNDING),
    Rule("environment", Verdict.LOGGED, says=_ROUNDING),
    Rule(
        "environment.threads",
        Verdict.LOGGED,
        says=f"{_ROUNDING}: sums of a matrix product on a CPU depend on the number of threads",
        hint="train.threads={saved} keeps the bits of these sums",
    ),
)

# With `parallel.invariant_ranks`, no bit of an iteration depends on these.
_OF_NO_BIT = frozenset(f"topology.{name}" for name in ("world_size", "dp", "pp", "vpp", "zero_stage"))
# No iteration depends on the fields of these rules.
_OUTSIDE_ITERATIONS = frozenset({"model.initializer_range", "data.valid_fingerprint", "evaluation"})


def flags_set(section: CheckpointSection) -> set[str]:
    """Return the set flags that allow differences."""
    names = ("reshard", "override_scheduler", "override_batch_size", "override_data", "override_freeze")
    return {f"checkpoint.{name}" for name in names if getattr(section, name)}


def rules_for(section: CheckpointSection) -> Sequence[Rule]:
    """Return the rules that apply; a fine-tuning run shares only the model, or parts of it, and a base of adapters."""
    if section.finetune:
        found = [rule for rule in RULES if rule.field.startswith(("model", "base"))]
        if section.partial:
            return [replace(rule, verdict=Verdict.LOGGED, says=_PARTS) for rule in found]
        return [*found, *(Rule(f"model.{name}", Verdict.LOGGED, says=_ROWS) for name in _SIZES if section.resize)]
    if section.use_checkpoint_scheduler:
        return [rule for rule in RULES if not rule.field.startswith(("schedule", *SECTIONS))]
    return RULES


def compared(saved: Json, current: Json) -> tuple[Json, Json]:
    """Return two states in the form in which they are compared.

    The optimizer's groups are replaced by whether each parameter of both states has weight decay; its value is in
    `adam`. A member of the optimizer that the saved state omits is removed from both. Other patterns of `freeze` that
    leave the same parameters to train are no difference. An `invariant_ranks` that is absent is 0. Saved counts of
    samples are converted to samples of the current length.
    """
    saved = in_samples_of(current.get("batch", {}).get("seq_length"), saved)
    saved, current = _with_invariant_ranks(saved), _with_invariant_ranks(current)
    theirs, ours = saved.get("optimizer", {}), current["optimizer"]
    if not isinstance(theirs, Mapping):
        return saved, current
    old, new = ({"name": table["name"]} if "name" in theirs else {} for table in (theirs, ours))
    if "groups" in theirs:
        there, here = _decays(theirs["groups"]), _decays(ours["groups"])
        if there is None or here is None:
            return saved, current
        both = there.keys() & here.keys()
        if there.keys() == here.keys():
            saved, current = ({k: v for k, v in state.items() if k != "freeze"} for state in (saved, current))
        old["weight_decay"], new["weight_decay"] = ({name: known[name] for name in both} for known in (there, here))
    return {**saved, "optimizer": old}, {**current, "optimizer": new}


def _with_invariant_ranks(state: Json) -> Json:
    topology = state.get("topology", {})
    return {**state, "topology": {"invariant_ranks": 0, **topology}} if isinstance(topology, Mapping) else state


def with_same_bits(found: Sequence[Difference], current: Json) -> list[Difference]:
    """Return the differences, with "same bits" as the effect of another topology where the loss curve keeps its bits.

    It does if `invariant_ranks` is on and all else that an iteration depends on is equal. Tests prove it on CPUs, so a
    run on another device does not get this message.

    Args:
        found: the differences between the states that `compared` returns.
        current: the run's own state.
    """
    others = [d for d in found if d.field not in _OF_NO_BIT and d.rule.field not in _OUTSIDE_ITERATIONS]
    is_on = current["topology"].get("invariant_ranks", 0) > 0 and current["environment"]["device"] == "cpu"
    if others or not is_on:
        return list(found)
    rules = {d.field: replace(d.rule, says=_SAME_BITS, hint="same bits") for d in found if d.field in _OF_NO_BIT}
    return [replace(d, rule=rules.get(d.field, d.rule)) for d in found]


def _decays(groups: object) -> dict[str, bool] | None:
    """Return whether each parameter has weight decay, as the first group does. None if the groups are malformed."""
    if not isinstance(groups, list):
        return None
    found = dict[str, bool]()
    for number, group in enumerate(groups):
        names = group.get("names") if isinstance(group, Mapping) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return None
        found |= dict.fromkeys(names, number == 0)
    return found


def model_record(config: ModelConfig) -> Json:
    """Return every field of a model as JSON; one that came after the first format is absent where it has its default.

    So an activation that is absent is the tanh form of GELU, and a model without `lora` has no adapters.
    """
    table = {name: value.value if isinstance(value, Enum) else value for name, value in asdict(config).items()}
    for field in fields(config):
        if field.metadata.get(ADDED) and getattr(config, field.name) == field.default:
            del table[field.name]
    if not is_adapted(config):
        del table["lora"]
    return table


def describe(
    config: Config,
    *,
    schedule: Schedule,
    topology: Topology,
    fingerprint: str,
    environment: Json,
    valid_fingerprint: str | None = None,
    weights: Mapping[str, Fraction] | None = None,
    marks: DocumentMarks | None = None,
    documents: str | None = None,
) -> Json:
    """Return the part of the record that is constant during a run.

    Args:
        fingerprint: of the training data.
        valid_fingerprint: of the validation data; None where nothing is evaluated.
        weights: the share of each source of training data by its fingerprint.
        marks: the documents of `data.document_mask`; None without it.
        documents: the fingerprint of the documents' borders; None where no sample depends on them.
    """
    train = config.train
    frozen, sizes = frozen_names(config.model, train.freeze), batch_schedule_of(train)
    return {
        "model": model_record(config.model),
        "topology": {
            "world_size": topology.world_size,
            "tp": topology.tp,
            "pp": topology.pp,
            "vpp": topology.vpp,
            "sp": topology.sp,
            "dp": topology.dp,
            "zero_stage": config.parallel.zero_stage,
            **({"invariant_ranks": config.parallel.invariant_ranks} if config.parallel.invariant_ranks else {}),
        },
        "batch": {
            "global_batch_size": train.global_batch_size,
            "seq_length": train.seq_length,
            "micro_batch_size": train.micro_batch_size,
            **({"batch_schedule": str(sizes)} if len(sizes.sizes) > 1 else {}),
        },
        "data": {
            "fingerprint": fingerprint,
            **data_record(config.data, weights or {}, marks, documents, micro_batch_size=train.micro_batch_size),
            **({"valid_fingerprint": valid_fingerprint} if valid_fingerprint else {}),
        },
        "evaluation": {
            "eval_interval": train.eval_interval,
            **({"eval_iters": train.eval_iters} if train.eval_interval else {}),
        },
        "clip_grad": train.clip_grad,
        "seed": train.seed,
        "schedule": schedule.record(),
        **settings_record(config.optimizer),
        "optimizer": optimizer_record(config.model, config.optimizer, frozen),
        **({"freeze": list(train.freeze)} if train.freeze else {}),
        "precision": {"dtype": train.dtype.value},
        "environment": environment,
    }


def state_record(progress: Progress, lr: float, description: Json) -> Json:
    """Return the whole `trainer_state.json`."""
    return {"format": FORMAT, **progress.record(), "lr": lr, **description}


def saved_progress(state: Json, *, seq_length: int, where: object) -> Progress:
    """Return the progress in a state file; if `seq_length` differs, the position is converted through tokens.

    Raises:
        CheckpointError: if it is missing or impossible.
    """
    try:
        saved = Progress.from_record(state)
        saved_length = integer(state["batch"]["seq_length"])
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError("A state file has no progress", where=where, found=repr(error)) from error
    if saved_length == seq_length:
        return saved
    return replace(saved, consumed_samples=saved.consumed_tokens // seq_length, valid_loss=None)


def saved_model(state: Json, *, where: object) -> ModelConfig:
    """Return the model in a state file.

    Raises:
        CheckpointError: if it is missing or cannot be built.
    """
    try:
        values: dict[str, Any] = dict(_table(state["model"]))
        scaling = values.pop("rope_scaling")
        values["family"] = _family(values["family"])
        values["activation"] = Activation(values.get("activation", Activation.gelu_tanh.value))
        lora: dict[str, Any] = dict(_table(values.pop("lora", {})))
        scaling = None if scaling is None else RopeScaling(**scaling)
        model = ModelConfig(**values, rope_scaling=scaling, lora=LoraConfig(**lora))
        _same_kinds(model)
        found = problems(model) or adapter_problems(model)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError("A state file has no model", where=where, found=repr(error)) from error
    if found:
        raise CheckpointError("A state file has a model that cannot be built", where=where, found="; ".join(found))
    return model


def _family(name: object) -> Family:
    known = [family.value for family in Family]
    if name not in known:
        raise ValueError(f"model.family is {name!r}, known are {', '.join(known)}")
    return Family(name)


def _same_kinds(model: ModelConfig) -> None:
    """Refuse members whose type differs from the schema's; an integer is accepted for a float."""
    for table in (model, model.rope_scaling, model.lora):
        for field in () if table is None else fields(table):
            value = getattr(table, field.name)
            kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
            if not any(_is_kind(value, kind) for kind in kinds):
                raise TypeError(f"{field.name} is {value!r}")


def _is_kind(value: object, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_kind(member, get_args(kind)[0]) for member in value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def saved_frozen(state: Json, model: ModelConfig, *, where: object) -> frozenset[str]:
    """Return the stored names of the parameters that were frozen when a state file was written.

    Raises:
        CheckpointError: if its patterns are malformed.
    """
    patterns = state.get("freeze", [])
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise CheckpointError("A state file has no valid patterns of frozen parameters", where=where, found=patterns)
    return frozen_names(model, patterns)


def saved_schedule(state: Json, section: OptimizerSection, *, where: object) -> tuple[Schedule, OptimizerSection]:
    """Return the learning-rate schedule in a state file, and `section` with the optimizer settings in it.

    Raises:
        CheckpointError: if any of them is missing or not a valid number.
    """
    try:
        values = _table(state["schedule"])
        unit = "samples" if "decay_samples" in values else "iters"
        if values.keys() != {"style", "lr", "min_lr", *(f"{name}_{unit}" for name in COUNTS)}:
            raise ValueError(f"a schedule of {sorted(values)}")
        counts = {name: integer(values[f"{name}_{unit}"]) for name in COUNTS}
        style = DecayStyle(values["style"]).value
        schedule = Schedule(
            style=style,
            lr=finite_number(values["lr"], least=0),
            min_lr=finite_number(values["min_lr"], least=0),
            **counts,
            is_in_samples=unit == "samples",
        )
        return schedule, replace(section, **_saved_settings(state, section))
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError("A state file has no schedule", where=where, found=repr(error)) from error


def _saved_settings(state: Json, section: OptimizerSection) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, keys in OPTIMIZERS[section.name].numbers.items():
        table = _table(state[name])
        for theirs, key in keys.items():
            match getattr(section, key):
                case bool() if not isinstance(table[theirs], bool):
                    raise TypeError(f"{table[theirs]!r} is not true or false")
                case bool():
                    found[key] = table[theirs]
                case int():
                    found[key] = integer(table[theirs])
                case _:
                    found[key] = finite_number(table[theirs], least=0)
    return found


def _table(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is no object")
    return value
