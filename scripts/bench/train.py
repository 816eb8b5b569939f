"""Measure training GPT-2 against transformers: `python -m scripts.bench.train [SIZE ...] [--threads N] [--json]`.

Both sides train the same model from the same values on the same tokens and targets, each in its own process, and decay
the same parameters. They take turns: a round times some whole steps of each, while the others wait. A step is
zero_grad, forward, loss, backward, clipping of the norm and fused AdamW. Our side is the trainer's `train_step`. The
other side is the loop from transformers' documentation, with its default attention and, for comparison, with its eager
attention. The exit status is 1 if the losses of the first step differ. Beside the speed stand the page faults and the
system time of a step in the rounds, and of the bytes that a step allocates what torch's profiler counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from models import families
from scripts.bench.gpt2 import gpt2_config
from trainer.config.derived import topology_of
from trainer.config.optimizer import OptimizerSection
from trainer.config.schema import Config
from trainer.config.train import Dtype, TrainSection
from trainer.launch import process_group as launch
from trainer.optim.adamw import AdamSettings, build_adamw
from trainer.optim.table import no_decay_names
from trainer.run.parallelize import build_context, build_grid, build_models
from trainer.run.random import dropout_key
from trainer.run.state import ModelPart, TrainerState
from trainer.training.step import train_step

OURS, THEIRS, EAGER = "reprise", "transformers", "transformers, eager attention"


@dataclass(frozen=True, slots=True)
class Size:
    """A GPT-2 and its batch; a round times `steps` steps of each side. Ours pads the vocabulary as its configs do."""

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    batch: int
    steps: int
    seq_length: int = 64
    pad_vocab_multiple: int = 1


SIZES: Mapping[str, Size] = {
    "small": Size(4, 4, 128, 256, batch=12, steps=30),
    "gpt2_124m": Size(12, 12, 768, 50257, batch=4, steps=3, pad_vocab_multiple=128),
    "tiny": Size(2, 2, 16, 64, batch=2, steps=2),
}

Step = Callable[[torch.Tensor], float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named sizes, print the results and return 0."""
    options = _parser().parse_args(arguments)
    agree = True
    for name in options.sizes or ["small", "gpt2_124m"]:
        result = measure(name, options)
        rates, first = result.rates, result.first_losses
        agree = agree and agreement(first, options)
        document = {
            "size": name,
            **result.setting,
            "dtype": options.dtype,
            "compile": options.compile,
            "dropout": options.dropout,
            "padded_vocab": _config(SIZES[name], options).model.padded_vocab_size,
            "rounds": options.rounds,
            "tokens_per_s": {side: statistics.median(values) for side, values in rates.items()},
            "ratio": {side: _ratio(rates[OURS], rates[side]) for side in rates if side != OURS},
            "first_loss": first,
            "loss": result.losses,
            "step": {side: _per_step(costs) for side, costs in result.costs.items()},
        }
        print(json.dumps(document) if options.json else table(document, rates), flush=True)
        print(_agreement_line(first, options), file=sys.stderr if options.json else sys.stdout, flush=True)
    return 0 if agree else 1


def agreement(losses: Mapping[str, float], options: argparse.Namespace) -> bool:
    """Return whether the sides have the same loss; always with dropout, since masks differ."""
    return options.dropout > 0 or all(abs(loss - losses[OURS]) <= _tolerance(options) for loss in losses.values())


def _agreement_line(losses: Mapping[str, float], options: argparse.Namespace) -> str:
    if options.dropout:
        return "  losses of the first step are not compared: dropout draws other masks"
    listed = ", ".join(f"{loss:.7f}" for loss in losses.values())
    words = "agree" if agreement(losses, options) else "DIFFER"
    return f"  losses of the first step {words} within {_tolerance(options):.0e}: {listed}"


def _tolerance(options: argparse.Namespace) -> float:
    return 1e-5 if Dtype(options.dtype) is Dtype.float32 else 1e-2


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step takes of the system: page faults, seconds of the system, and allocated bytes."""

    faults: float
    system_s: float
    allocated_bytes: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The results by side.

    Args:
        rates: tokens per second, round by round.
        costs: of a step, round by round.
        first_losses: of the first step.
        losses: of the last step.
        setting: device and threads.
    """

    rates: Mapping[str, list[float]]
    costs: Mapping[str, list[StepCost]]
    first_losses: Mapping[str, float]
    losses: Mapping[str, float]
    setting: Mapping[str, object]


def _per_step(costs: Sequence[StepCost]) -> dict[str, float]:
    """Return the medians over rounds."""
    return {
        "faults": statistics.median(cost.faults for cost in costs),
        "system_ms": 1e3 * statistics.median(cost.system_s for cost in costs),
        "allocated_mb": statistics.median(cost.allocated_bytes for cost in costs) / 1e6,
    }


def measure(name: str, options: argparse.Namespace) -> Measured:
    """Run the rounds of all sides.

    Raises:
        SystemExit: if the process of a side has ended.
    """
    size = SIZES[name]
    rates: dict[str, list[float]] = {side: [] for side in (OURS, THEIRS, EAGER)}
    costs: dict[str, list[StepCost]] = {side: [] for side in rates}
    with ExitStack() as ending:
        sides, settings = dict[str, _Side](), list[Mapping[str, object]]()
        for side in (OURS, THEIRS, EAGER):
            sides[side] = ending.enter_context(_started(side, name, options))
            settings.append(sides[side].hear())
        warm = {name: side.run() for name, side in sides.items()}
        losses = {name: result[1][-1] for name, result in warm.items()}
        for number in range(options.rounds):
            for side in list(sides) if number % 2 else list(reversed(sides)):
                seconds, round_losses, cost = sides[side].run()
                losses[side] = round_losses[-1]
                rates[side].append(size.batch * size.seq_length * size.steps / seconds)
                costs[side].append(cost)
    first = {name: result[1][0] for name, result in warm.items()}
    return Measured(rates, costs, first, losses, settings[0])


@dataclass(frozen=True, slots=True)
class _Side:
    """The process of a side, and the pipe that requests its rounds."""

    process: SpawnProcess
    pipe: Connection

    def run(self) -> tuple[float, list[float], StepCost]:
        """Run the steps of a round; return their seconds, their losses, and the cost of a step."""
        with suppress(ConnectionError):  # the process may have ended
            self.pipe.send(True)
        seconds, losses, cost = self.hear()
        return seconds, losses, cost

    def hear(self) -> Any:
        """Return its next message.

        Raises:
            SystemExit: if it has ended.
        """
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
        raise SystemExit(f"bench_train: the process of {self.process.name} ended, status {self.process.exitcode}")


@contextmanager
def _started(side: str, name: str, options: argparse.Namespace) -> Iterator[_Side]:
    """Start the process of a side, and end it on exit."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_serve, args=(sender, side, name, options), name=side, daemon=True)
    process.start()
    sender.close()  # so that a process that has died is noticed
    try:
        yield _Side(process, receiver)
    finally:
        receiver.close()
        process.terminate()
        process.join()


def _serve(pipe: Connection, side: str, name: str, options: argparse.Namespace) -> None:
    """Run the steps of a size at each request from the pipe, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    size, config = SIZES[name], _config(SIZES[name], options)
    torch.manual_seed(1234)
    device, step = _start_ours(config, options) if side == OURS else _start_theirs(side, config, options)
    # The sides' own defaults differ where OMP_NUM_THREADS is set.
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    generator = torch.Generator().manual_seed(1234)
    shape = (size.batch, size.seq_length + 1)
    batches = [torch.randint(size.vocab_size, shape, generator=generator).to(device) for _ in range(size.steps)]
    pipe.send({"device": device.type, "threads": torch.get_num_threads()})
    allocated = 0.0
    with suppress(EOFError, ConnectionError):
        while pipe.recv():
            before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            losses = [step(batch) for batch in batches]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
            allocated = allocated or _allocated_bytes(lambda: step(batches[0]))
            faults, system_s = after.ru_minflt - before.ru_minflt, after.ru_stime - before.ru_stime
            pipe.send((seconds, losses, StepCost(faults / size.steps, system_s / size.steps, allocated)))


def _allocated_bytes(step: Callable[[], object]) -> float:
    """Return the bytes that torch allocates in a step on a CPU, those freed in it included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.events() or []
    return float(sum(max(0, event.self_cpu_memory_usage) for event in events))


def _start_ours(config: Config, options: argparse.Namespace) -> tuple[torch.device, Step]:
    cluster = launch.start(options.device, deterministic=False, variables={})
    values = _their_model(config, cluster.device).state_dict()
    launch.keep_freed_memory(cluster.device)  # as the training loop does
    return cluster.device, _our_step(config, values, cluster)


def _start_theirs(side: str, config: Config, options: argparse.Namespace) -> tuple[torch.device, Step]:
    is_cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if is_cuda else "cpu")
    model = _their_model(config, device, "eager" if side == EAGER else None)
    return device, _their_step(config, model, device)


def _our_step(config: Config, values: Mapping[str, torch.Tensor], cluster: launch.Cluster) -> Step:
    topology = topology_of(config, 1)
    (model,) = build_models(config, cluster.device, topology=topology, mesh=None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = values[name].flatten()
            parameter.zero_().view(-1)[: value.numel()].copy_(value)  # rows that pad the vocabulary are the last
    section = config.optimizer
    betas = (section.adam_beta1, section.adam_beta2)
    no_decay = no_decay_names(config.model)
    adam = AdamSettings(section.lr, section.weight_decay, *betas, section.adam_eps, no_decay)
    state = TrainerState(config.model, [ModelPart(model, build_adamw(model, adam))], build_grid(topology, None))
    context = build_context(config, state, topology=topology, mesh=None, cluster=cluster)
    iteration = 0

    def step(windows: torch.Tensor) -> float:
        nonlocal iteration
        iteration += 1
        key = dropout_key(config.train.seed, iteration, micro_batch=0)
        clip_grad, lr = config.train.clip_grad, section.lr
        result = train_step(state, [windows], keys=[key], lr=lr, clip_grad=clip_grad, context=context, cluster=cluster)
        return result.loss

    return step


def _their_model(config: Config, device: torch.device, attention: str | None = None) -> nn.Module:
    table = {**families.hf_config(config.model), "attn_implementation": attention}
    model: nn.Module = GPT2LMHeadModel(GPT2Config.from_dict(table))
    return model.to(device).train()


def _their_step(config: Config, model: nn.Module, device: torch.device) -> Step:
    section = config.optimizer
    betas = (section.adam_beta1, section.adam_beta2)
    no_decay, parameters = no_decay_names(config.model), dict(model.named_parameters())
    groups = [
        {"params": [parameter for name, parameter in parameters.items() if (name in no_decay) is not decays]}
        | {"weight_decay": section.weight_decay if decays else 0.0}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, section.lr, betas, section.adam_eps, fused=True)
    called = torch.compile(model) if config.train.compile else model
    is_bfloat16 = config.train.dtype is Dtype.bfloat16

    def step(windows: torch.Tensor) -> float:
        tokens, targets = windows[:, :-1], windows[:, 1:].contiguous()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bfloat16):
            # transformers shifts `labels` itself, which would leave out the last target of every sample.
            loss = called(input_ids=tokens, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad)
        optimizer.step()
        return float(loss.detach())

    return step


def _config(size: Size, options: argparse.Namespace) -> Config:
    model = gpt2_config(
        size.n_layer,
        size.n_head,
        size.n_embd,
        size.vocab_size,
        dropout=options.dropout,
        pad_vocab_multiple=options.pad_vocab_multiple or size.pad_vocab_multiple,
    )
    train = TrainSection(dtype=Dtype(options.dtype), compile=options.compile, seq_length=size.seq_length)
    return Config(model, train=train, optimizer=OptimizerSection(lr=1e-3))


def _ratio(rates: Sequence[float], base_rates: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(rates, base_rates, strict=True))


def table(document: Mapping[str, Any], rates: Mapping[str, Sequence[float]]) -> str:
    """Return the results as lines of text, with the tokens per second of each side, round by round."""
    settings = ", ".join(
        f"{key} {document[key]}"
        for key in ("device", "dtype", "compile", "dropout", "threads", "padded_vocab", "rounds")
    )
    lines = [f"{document['size']}: {settings}"]
    for side, values in rates.items():
        speed = f"{statistics.median(values):>12,.0f} tok/s ({min(values):,.0f} to {max(values):,.0f})"
        ratio = "" if side == OURS else f", {OURS} is {_ratio(rates[OURS], values):.3f} times as fast"
        step = document["step"][side]
        lines.append(f"  {side:<30}{speed}, last loss {document['loss'][side]:.4f}{ratio}")
        lines.append(
            f"  {'':<30}a step: {step['faults']:,.0f} page faults, {step['system_ms']:.1f} ms of the system, "
            f"{step['allocated_mb']:,.1f} MB allocated"
        )
    return "\n".join(lines)


def _size(name: str) -> str:
    if name not in SIZES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SIZES)}")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_train", description="Measure training GPT-2 against transformers.")
    parser.add_argument("sizes", nargs="*", type=_size, metavar="SIZE", help=f"of {', '.join(SIZES)} (all but tiny)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads of both sides (all cores)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="timed rounds of each side (%(default)d)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=[dtype.value for dtype in Dtype])
    parser.add_argument("--compile", action="store_true", help="compile both models")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help="of both sides (%(default)g)")
    parser.add_argument(
        "--pad-vocab-multiple", type=int, default=0, metavar="N", help="of our side, in memory (as in the configs)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per size")
    return parser


if __name__ == "__main__":
    sys.exit(main())
