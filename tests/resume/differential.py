"""Random configurations: a run that is interrupted at random moments leaves what the unbroken run leaves.

A case is a function of its number and the seed, so that a test's name and the seed repeat it.
"""

from __future__ import annotations

import json
import random
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from reprise.storage import TRACKER, CheckpointFolder, Files
from tests.crash.moments import DEADLINE_S, await_true, standing
from tests.harness import Ended, launch, state_of, tensor_files

TERM, KILL = signal.SIGTERM, signal.SIGKILL

# What differs by design, and why.
OF_THE_RECORD = {
    "topology": "of the start that saved; compared where no start has moved",
    "branch": "a resume from an older iteration begins another one",
    "run_id": "drawn at random by the first start",
}
OF_A_LINE = {
    "seconds": "time",
    "checkpoint_seconds": "time",
    "tokens_per_second": "time",
    "mfu": "time",
    "time": "time",
    "data_seconds": "time",
    "host_peak_bytes": "of the process and the saves under way",
    "device_peak_bytes": "the same of the device",
    "device_reserved_bytes": "the same of the device",
    "resumed": "tells of a start",
    "start": "tells of a start, with its times",
    "launch": "names a start",
}
EVENTS = ("evaluation",)  # `start` and the saves tell of starts and attempts, with their times
UNREAD = {
    "manifest.json": "names the attempt; its digests are those of the files that are compared",
    "run_config.json": "has the folder of the run, and the topology of the start",
    "host.json": "names the attempt and the host",
    "trainer_state.json": "compared by member, without the id of the run",
}
ROUNDING = {"float32": 2e-3, "bfloat16": 5e-2}  # relative, of losses after a move that only promises rounding

SINGLE = (1, ())
_TP, _PP = "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"
_VPP, _SP = "parallel.num_virtual_stages_per_pipeline_rank=2", "parallel.sequence_parallel=true"
Topology = tuple[int, tuple[str, ...]]


def _zero(stage: int) -> str:
    return f"parallel.zero_stage={stage}"


OF_DATA: list[Topology] = [
    SINGLE,
    *((2, (_zero(stage),)) for stage in range(4)),
    (2, (_PP,)),
    (2, (_PP, _VPP)),
    (4, (_zero(2),)),
    (4, (_PP, _zero(1))),
    (4, (_PP, _VPP, _zero(3))),
]
OF_TENSORS: list[Topology] = [(2, (_TP,)), (2, (_TP, _SP)), (4, (_TP, _zero(3))), (4, (_TP, _SP, _PP))]


@dataclass(frozen=True, slots=True)
class Interruption:
    """Where all ranks are killed, or one is asked to end."""

    number: signal.Signals
    moment: str
    iteration: int


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration and the starts of a run of it: a topology each, and where all but the last are interrupted."""

    seed: str
    overrides: tuple[str, ...]
    topologies: tuple[Topology, ...]
    interruptions: tuple[Interruption, ...]
    base: str | None = None
    has_local: bool = False
    is_bitwise: bool = True

    def of(self, name: str) -> str | None:
        """Return the value of a key of the configuration, None where it has its default."""
        return next((text.partition("=")[2] for text in self.overrides if text.startswith(f"{name}=")), None)

    def __str__(self) -> str:
        starts = " | ".join(f"{ranks} {' '.join(axes)}" for ranks, axes in self.topologies)
        moments = ", ".join(f"{i.number.name} at {i.moment} {i.iteration}" for i in self.interruptions)
        return f"case {self.seed}: {' '.join(self.overrides)} base={self.base}\n  starts: {starts}\n  {moments}"


def case_of(seed: int, number: int, *, ranks: int = 4) -> Case:
    """Return the case of a number, with up to so many ranks."""
    draw = random.Random(f"{seed}/{number}")
    iterations = draw.randint(6, 10)
    family = draw.choice(["gpt2", "llama3", "qwen3"])
    overrides, base = _model(draw, family)
    intervals = {name: draw.choice(values) for name, values in _INTERVALS.items()}
    if not (intervals["train.eval_interval"] and intervals["checkpoint.max_checkpoint_keep"]):
        intervals["checkpoint.keep_best"] = 0
    invariant, by_samples = draw.random() < 0.4, draw.random() < 0.3
    overrides += [
        f"train.dtype={draw.choice(['float32', 'bfloat16'])}",
        f"optimizer={draw.choice(['adamw', 'adamw', 'adamw' if base else 'muon'])}",
        *_length(draw, iterations, by_samples=by_samples, ramps=not invariant and draw.random() < 0.4),
        *(f"{name}={value}" for name, value in intervals.items()),
        f"checkpoint.async_save={str(draw.random() < 0.7).lower()}",
    ]
    overrides += _further(random.Random(f"further {seed}/{number}"), has_base=base)
    has_local = draw.random() < 0.3
    possible = OF_DATA if invariant else [*OF_DATA, *OF_TENSORS]
    possible = [topology for topology in possible if topology[0] <= ranks]
    starts = draw.choices([2, 3, 4], [5, 3, 1])[0]
    moves = draw.random() < 0.35
    first = draw.choice(possible)
    topologies = tuple(draw.choice(possible) if moves and n else first for n in range(starts))
    if invariant:
        overrides.append("parallel.invariant_ranks=4")
    every = {"evaluation": intervals["train.eval_interval"], "save": intervals["checkpoint.save_interval"]}
    return Case(
        f"{seed}/{number}",
        tuple(overrides),
        topologies,
        tuple(_interruptions(draw, starts - 1, every, iterations)),
        base=family if base else None,
        has_local=has_local,
        is_bitwise=invariant or len(set(topologies)) == 1,
    )


_INTERVALS = {
    "train.eval_interval": [0, 1, 2, 2, 3],
    "checkpoint.save_interval": [0, 1, 2, 3, 4],
    "checkpoint.max_checkpoint_keep": [0, 1, 1, 2, 3],
    "checkpoint.keep_best": [0, 1, 2],
    "checkpoint.save_retain_interval": [0, 0, 3, 4],
    "checkpoint.save_weights_interval": [0, 0, 1, 2],
    "checkpoint.weights_keep": [0, 1, 2],
    "checkpoint.local.save_interval": [1, 2, 3],
    "checkpoint.local.keep": [1, 2],
}
_FURTHER = {
    "train.ema_decay": ["0.0", "0.0", "0.9"],
    "train.activation_checkpointing": ["false", "false", "true"],
    "train.skip_samples": ["[]", "[]", '["20-30","41-42"]'],
    "data.document_mask": ["false", "false", "true"],
    "checkpoint.file_bytes": ["2147483648", "20000", "3000"],
    "checkpoint.staging_bytes": ["null", "null", "0", "5000"],
    "checkpoint.weights_dtype": ["bfloat16", "float32"],
    "checkpoint.check_replicas": ["1", "1", "0", "2"],
}
_FURTHER_OF_THE_MODEL = {"model.tie_word_embeddings": ["true", "false"], "model.pad_vocab_multiple": ["1", "8"]}
_BATCH = 16
_FIXED = (
    "train.seq_length=16",
    "train.micro_batch_size=2",
    f"train.global_batch_size={_BATCH}",
    "train.threads=1",
    "train.eval_iters=2",
    "checkpoint.stall_timeout_s=200",
    "checkpoint.reshard=true",
    "logging.tensorboard=false",
    "model.n_head=2",
    "model.n_layer=4",
    "model.max_position_embeddings=32",
)


def _model(draw: random.Random, family: str) -> tuple[list[str], bool]:
    blocks = "transformer.h.0.*" if family == "gpt2" else "model.layers.0.*"
    with_adapters = family != "qwen3" and draw.random() < 0.2
    width, inner = (20, 44) if with_adapters else (draw.choice([16, 20, 24]), draw.choice([36, 44]))
    found = [f"model={family}_tiny", *_FIXED, f"model.n_embd={width}", f"model.intermediate_size={inner}"]
    if family == "gpt2":
        found.append(f"model.dropout={draw.choice([0.0, 0.1])}")
    else:
        found.append("model.n_kv_head=2")
    if family == "qwen3":
        found.append("model.head_dim=14")
    if with_adapters:
        found += ["model.lora.rank=2", f"model.lora.dropout={draw.choice([0.0, 0.1])}"]
    elif draw.random() < 0.2:
        found.append(f'train.freeze=["{blocks}"]')
    return found, with_adapters


def _further(draw: random.Random, *, has_base: bool) -> list[str]:
    """Return values of keys that no topology depends on. A base has the sizes of its run."""
    table = _FURTHER if has_base else _FURTHER | _FURTHER_OF_THE_MODEL
    return [f"{name}={draw.choice(choices)}" for name, choices in table.items()]


def _length(draw: random.Random, iterations: int, *, by_samples: bool, ramps: bool) -> list[str]:
    """Return a schedule that makes so many iterations, the first three of which are smaller if the batch ramps up."""
    ramp = ["train.batch_schedule=0:8 24:16"] if ramps else []
    if not by_samples:
        style = draw.choice(["cosine", "linear", "constant", "wsd"])
        return [
            *ramp,
            f"train.train_iters={iterations}",
            "schedule.lr_warmup_iters=3",
            f"schedule.lr_decay_style={style}",
        ]
    samples = 24 + 16 * (iterations - 3) if ramps else _BATCH * iterations
    return [*ramp, f"train.train_samples={samples}", "schedule.lr_warmup_samples=20"]


def _interruptions(draw: random.Random, count: int, every: dict[str, int], iterations: int) -> Iterator[Interruption]:
    for _ in range(count):
        number, iteration = draw.choice([TERM, KILL]), draw.randint(1, iterations)
        moments = ["step"]
        if every["evaluation"] and iteration % every["evaluation"] == 0:
            moments += ["evaluation"] * 2
        if iteration == iterations or (every["save"] and iteration % every["save"] == 0):
            moments += ["save", "prepare"]
        yield Interruption(number, draw.choice(moments), iteration)


@cache
def _base(family: str) -> Path:
    """Return a run whose weights adapters of a family are trained on."""
    folder = Path(tempfile.mkdtemp(prefix="differential-base-")) / "run"
    model = [f"model={family}_tiny", *_FIXED, "model.n_embd=20", "model.intermediate_size=44"]
    model += [] if family == "gpt2" else ["model.n_kv_head=2"]
    ended = launch(folder, [*model, "train.train_iters=1", "schedule.lr_warmup_iters=0"])
    assert ended.ok, ended.text
    return folder


class Failed(Exception):
    """A start that did not end as it should."""


def arguments_of(case: Case, folder: Path) -> list[str]:
    """Return the overrides of a run in a folder."""
    found = list(case.overrides)
    if case.has_local:
        found.append(f"checkpoint.local.dir={folder / 'local'}")
    if case.base is not None:
        found += [f"checkpoint.load={_base(case.base)}", "checkpoint.finetune=true"]
    # Hydra's grammar needs the quotes around a value with blanks.
    return [f'{key}="{value}"' if " " in value else text for text in found for key, _, value in [text.partition("=")]]


def train(case: Case, folder: Path, topology: Topology, interruption: Interruption | None) -> None:
    """Start the run of a case, and interrupt it."""
    ranks, axes = topology
    overrides, run = [*arguments_of(case, folder), *axes], folder / "run"
    folder.mkdir(exist_ok=True)
    if interruption is None:
        _require(launch(run, overrides, ranks=ranks), {0})
        return
    moment, gates = interruption.moment, Path(tempfile.mkdtemp(dir=folder))
    gated = range(ranks) if moment in ("step", "evaluation") else [0]
    standings = standing(
        run,
        overrides,
        moment=moment,
        iteration=interruption.iteration,
        ranks=ranks,
        gated=gated,
        gates=gates / "gate",
    )
    with standings as (running, gate):
        reached = [Path(gate.folder, f"reached.{rank}") for rank in gated]
        await_true(
            lambda: (
                all(path.exists() for path in reached)
                or any(process.exitcode is not None for process in running.processes)
            )
        )
        is_there = all(path.exists() for path in reached)  # else the run is past that moment, and goes to its end
        if is_there and interruption.number is KILL:
            for rank in range(ranks):
                running.send(rank, KILL)
        elif is_there:
            running.send(ranks - 1, TERM)
            gate.await_heard([ranks - 1])
            gate.open()
        running.join(DEADLINE_S)
    _require(running.ended(), {-KILL if is_there and interruption.number is KILL else 0})


def _require(ended: Ended, statuses: set[int]) -> None:
    """Check the exit statuses of a start."""
    if set(ended.statuses) != statuses:
        raise Failed(ended.text)


def rows_of(run: Path) -> list[dict[str, object]]:
    """Return the lines of the metrics, without what differs by design."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row.get("event") in (None, *EVENTS)]
    return [{name: value for name, value in row.items() if name not in OF_A_LINE} for row in rows]


@dataclass(slots=True)
class Left:
    """What a run has left in a folder of checkpoints.

    Args:
        records: by iteration, the members of `trainer_state.json`.
        files: by iteration and name, those that are compared bytewise.
        others: the names beside the checkpoints and abandoned branches (`iter_*.superseded-1`, which starts that go
            back leave), and the tracker.
    """

    records: dict[int, dict[str, object]] = field(default_factory=dict)
    files: dict[int, dict[str, bytes]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    @staticmethod
    def of(folder: Path, *, with_interim: bool) -> Left:
        """Read a folder, without interim checkpoints unless they are to go."""
        found, left = CheckpointFolder(folder, Files()), Left()
        for iteration in found.committed():
            path = found.iteration(iteration)
            record = state_of(path)
            if record.get("interim") and not with_interim:
                continue
            left.records[iteration] = record
            documents = {p.name: p.read_bytes() for p in path.iterdir() if p.is_file() and p.name not in UNREAD}
            left.files[iteration] = {**tensor_files(path), **documents}
        if folder.is_dir():
            left.others = [path.name for path in sorted(folder.iterdir()) if not path.name.startswith("iter_")]
            left.others.append(f"{TRACKER}: {found.tracker()}")
        return left


def differences(case: Case, whole: Path, broken: Path) -> list[str]:
    """Return how two runs of a case differ, in words."""
    found = list[str]()
    exact = (whole_rows := rows_of(whole / "run")) == (rows := rows_of(broken / "run"))
    if not exact and case.is_bitwise:
        found += [f"metrics: {a} | {b}" for a, b in zip(whole_rows, rows, strict=False) if a != b][:3]
        found += [f"metrics: {len(whole_rows)} lines, {len(rows)} in the interrupted run"]
    if not case.is_bitwise:
        found += _beyond_rounding(whole_rows, rows, ROUNDING[case.of("train.dtype") or "float32"])
    keeps_all = case.of("checkpoint.max_checkpoint_keep") == "0"
    for name in ("run/checkpoints", "run/checkpoints/weights", "local"):
        with_interim = not (keeps_all and name == "run/checkpoints")
        a, b = (Left.of(root / name, with_interim=with_interim) for root in (whole, broken))
        found += [f"{name}: {text}" for text in _between(case, a, b)]
    return found


def _between(case: Case, whole: Left, broken: Left) -> Iterator[str]:
    if whole.records.keys() != broken.records.keys():
        yield f"kept {sorted(whole.records)}, the interrupted run {sorted(broken.records)}"
    if whole.others != broken.others:
        yield f"{whole.others}, the interrupted run {broken.others}"
    inexact = set() if case.is_bitwise else {"best_loss", "valid_loss"}
    moves = len({*case.topologies}) > 1
    for iteration in sorted(whole.records.keys() & broken.records.keys()):
        a, b = whole.records[iteration], broken.records[iteration]
        for name in sorted(a.keys() | b.keys()):
            if name in inexact or (name in OF_THE_RECORD and (moves or name != "topology")):
                continue
            if a.get(name) != b.get(name):
                yield f"iteration {iteration}: {name}: {a.get(name)} | {b.get(name)}"
        files, others = whole.files[iteration], broken.files[iteration]
        if files.keys() != others.keys():
            yield f"iteration {iteration}: files {sorted(files)} | {sorted(others)}"
        elif case.is_bitwise:
            yield from (f"iteration {iteration}: {name}" for name in files if files[name] != others[name])


def _beyond_rounding(
    whole: Sequence[dict[str, object]], broken: Sequence[dict[str, object]], bound: float
) -> list[str]:
    """Return where positions differ, or losses by more than rounding."""

    def position(row: dict[str, object]) -> tuple[object, ...]:
        return tuple(row.get(name) for name in ("event", "iteration", "consumed_samples", "lr_hex"))

    if [position(row) for row in whole] != [position(row) for row in broken]:
        return ["metrics: other iterations, samples or rates"]
    losses = [(a.get(name), b.get(name)) for a, b in zip(whole, broken, strict=True) for name in ("loss", "valid_loss")]
    pairs = [(float(str(a)), float(str(b))) for a, b in losses if a is not None]
    return [f"a loss of {a}, in the interrupted run {b}" for a, b in pairs if abs(a - b) > bound * abs(a)]


def run_case(case: Case, folder: Path) -> list[str]:
    """Run a case in a new folder, and return what differs; also that a start failed."""
    whole, broken = folder / "whole", folder / "broken"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        train(case, whole, case.topologies[0], None)
        for topology, interruption in zip(case.topologies, (*case.interruptions, None), strict=True):
            train(case, broken, topology, interruption)
    except (AssertionError, Failed, TimeoutError) as error:
        return [f"a start failed: {str(error)[-1500:]}"]
    return differences(case, whole, broken)
