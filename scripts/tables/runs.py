"""Trains at each topology, resumes at others, and compares the loaded tensors and the losses.

A run of `SAVED + 5` iterations saves at iteration `SAVED` and trains on: the straight run. Each target topology loads
that save twice: one run saves it again at once, for the comparison of bytes, and one trains the last five iterations.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from multiprocessing.connection import wait
from pathlib import Path

from scripts.faults.ranks import become_rank, free_port
from scripts.faults.run_files import rows_of

SAVED = 3
STEPS = (1, 4, 5)  # after the load
FAMILIES = ("gpt2", "llama3", "qwen3")
DTYPES = ("float32", "bfloat16")

# Ranks are forked from a process that has imported these: a run then starts in a fraction of a second.
_PRELOAD = ["trainer.train_command", "trainer.training.loop", "trainer.start.fill", "trainer.parallel.tensor"]
_PRELOAD += ["torch.distributed.pipelining"]
_TURN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class NamedTopology:
    """A topology of the page: the number of ranks, and the keys that configure it."""

    name: str
    ranks: int
    keys: tuple[str, ...]

    def command(self, overrides: Sequence[str]) -> str:
        """Return the command line that trains at this topology."""
        program = "reprise train"
        if self.ranks > 1:
            program = f"torchrun --standalone --nproc-per-node {self.ranks} -m trainer"
        return " ".join([program, *overrides])


def _preset(name: str, ranks: int = 2) -> NamedTopology:
    return NamedTopology(name, ranks, (f"parallel={name}",))


SINGLE = _preset("single", 1)
ALL_AXES = NamedTopology("tp2_pp2", 4, ("parallel=tp2", "parallel.pipeline_model_parallel_size=2"))
TOPOLOGIES = (
    SINGLE,
    *map(_preset, ("ddp", "zero1", "zero2", "zero3", "tp2", "tp2_sp", "pp2", "pp2_vpp2")),
    ALL_AXES,
)


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """A family and the dtype of its activations."""

    family: str
    dtype: str


VARIANTS = tuple(ModelVariant(family, dtype) for family, dtype in product(FAMILIES, DTYPES))
ALL_PAIRS = VARIANTS[0]


def pairs(variant: ModelVariant) -> list[tuple[NamedTopology, NamedTopology]]:
    """Return the pairs of source and target that are run: all for `ALL_PAIRS`, else those with a hub on one side."""
    hubs = {SINGLE, ALL_AXES}
    return [pair for pair in product(TOPOLOGIES, TOPOLOGIES) if variant == ALL_PAIRS or hubs & {*pair}]


def straight_folder(variant: ModelVariant, source: NamedTopology) -> str:
    """Return the folder of a straight run, relative to the working directory."""
    return f"runs/tables/{variant.family}-{variant.dtype}/{source.name}"


def straight_keys(variant: ModelVariant, source: NamedTopology) -> list[str]:
    """Return the overrides of a straight run."""
    return [
        *source.keys,
        f"model={variant.family}_tiny",
        f"train.dtype={variant.dtype}",
        "train.seq_length=32",
        "train.micro_batch_size=4",
        "train.threads=1",
        "logging.tensorboard=false",
        f"train.train_iters={SAVED + STEPS[-1]}",
        f"schedule.lr_decay_iters={SAVED + STEPS[-1]}",
        f"checkpoint.save_interval={SAVED}",
        f"run.dir={straight_folder(variant, source)}",
    ]


def resume_keys(variant: ModelVariant, source: NamedTopology, target: NamedTopology) -> list[str]:
    """Return the overrides of a run that loads the save of `source` and trains on; the last one is `NO_SAVE`."""
    folder = straight_folder(variant, source)
    return [
        *target.keys,
        f"run.dir={folder}-to-{target.name}",
        f"checkpoint.load={folder}/checkpoints/iter_{SAVED:07d}",
        "checkpoint.reshard=true",
        NO_SAVE,
    ]


NO_SAVE = "checkpoint.save=null"
SAVE_AGAIN = f"train.train_iters={SAVED}"


@dataclass(frozen=True, slots=True)
class Resumed:
    """The result of a pair: whether the loaded tensors have the saved bytes, and the losses at `STEPS`."""

    is_bitwise: bool
    losses: tuple[float, ...]


@dataclass(slots=True)
class Results:
    """The losses of the straight runs at `STEPS`, and the result of each pair, by the names of the topologies."""

    straight: dict[tuple[ModelVariant, str], tuple[float, ...]] = field(default_factory=dict)
    resumed: dict[tuple[ModelVariant, str, str], Resumed] = field(default_factory=dict)


def run_all(folder: Path, say: Callable[[str], None]) -> Results:
    """Run every variant and pair.

    Args:
        folder: the working directory of the runs; each variant's runs are deleted after it.
        say: gets a line per variant and topology.

    Raises:
        RuntimeError: if a run fails or takes too long; with the end of its output.
    """
    results = Results()
    for variant in VARIANTS:
        for source in TOPOLOGIES:
            keys = straight_keys(variant, source)
            run_in_turn(folder, source, [keys])
            results.straight[variant, source.name] = _losses(folder / straight_folder(variant, source))
            say(f"{variant.family} {variant.dtype}: trained at {source.name}")
        for target in TOPOLOGIES:
            sources = [source for source, goal in pairs(variant) if goal == target]
            for source, resumed in zip(sources, _resume(folder, variant, sources, target), strict=True):
                results.resumed[variant, source.name, target.name] = resumed
            say(f"{variant.family} {variant.dtype}: resumed at {target.name} from {len(sources)} topologies")
        shutil.rmtree(folder / "runs")
    return results


def _resume(
    folder: Path, variant: ModelVariant, sources: Sequence[NamedTopology], target: NamedTopology
) -> list[Resumed]:
    turns: list[list[str]] = []
    for source in sources:
        keys = resume_keys(variant, source, target)
        again = [f"{key}-again" if key.startswith("run.dir=") else key for key in keys[:-1]]
        turns += [[*again, SAVE_AGAIN], keys]
    run_in_turn(folder, target, turns)
    results: list[Resumed] = []
    for source in sources:
        straight = folder / straight_folder(variant, source)
        resumed = straight.with_name(f"{straight.name}-to-{target.name}")
        saved_again = _tensor_files(resumed.with_name(f"{resumed.name}-again"))
        results.append(Resumed(is_bitwise=_tensor_files(straight) == saved_again, losses=_losses(resumed)))
    return results


def _losses(run: Path) -> tuple[float, ...]:
    loss_of_step = {row["iteration"] - SAVED: float.fromhex(row["loss_hex"]) for row in rows_of(run)}
    return tuple(loss_of_step[step] for step in STEPS)


def _tensor_files(run: Path) -> dict[str, bytes]:
    saved = run / "checkpoints" / f"iter_{SAVED:07d}"
    contents = {str(path.relative_to(saved)): path.read_bytes() for path in sorted(saved.rglob("*.safetensors"))}
    assert contents, saved
    return contents


_context = multiprocessing.get_context("forkserver")


def run_in_turn(folder: Path, topology: NamedTopology, turns: Sequence[Sequence[str]]) -> None:
    """Start the ranks of a topology once, and run the trainer with each list of overrides in turn.

    Raises:
        RuntimeError: if a rank fails or the runs take too long.
    """
    _context.set_forkserver_preload(_PRELOAD)
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [folder / f"rank{rank}.log" for rank in range(topology.ranks)]
    commands = [(free_port(), list(turn)) for turn in turns]
    ranks = [
        _context.Process(target=_rank, args=(rank, topology.ranks, str(folder), str(output), commands))
        for rank, output in enumerate(outputs)
    ]
    deadline = time.monotonic() + _TURN_TIMEOUT_S * (1 + len(turns))
    try:
        for process in ranks:
            process.start()
        running = ranks
        while running and time.monotonic() < deadline and not any(process.exitcode for process in ranks):
            wait([process.sentinel for process in running], timeout=1.0)
            running = [process for process in ranks if process.exitcode is None]
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    if any(process.exitcode for process in ranks):
        ends = "\n".join(output.read_text(encoding="utf-8")[-2000:] for output in outputs)
        raise RuntimeError(
            f"{topology.command(turns[0])} (or one of the {len(turns) - 1} runs after it) failed:\n{ends}"
        )


def _rank(rank: int, ranks: int, folder: str, output: str, commands: list[tuple[int, list[str]]]) -> None:
    import trainer.__main__

    os.chdir(folder)
    Path(output).unlink(missing_ok=True)
    become_rank(rank, ranks, port=commands[0][0], output=output)
    for port, overrides in commands:
        os.environ["MASTER_PORT"] = str(port)
        sys.argv = ["trainer", *overrides]
        trainer.__main__.main()
