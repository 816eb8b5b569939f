"""The training step: ours against transformers on the same values, tokens and targets, each in its own process.

A step is zero_grad, forward, loss, backward, clipping of the norm and fused AdamW. Our side is the trainer's
`train_step`; the other side is the loop from transformers' documentation, with its default attention and with its
eager attention. The losses of the first step have to agree.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from models import families
from scripts.bench.harness import LEFT_OUT, Figures, Goal, apart, report, take_turns
from scripts.bench.nanogpt import NanoGPT
from scripts.bench.subject import build_subject, config_of, tokens_of, windows_of
from trainer.config.dtype import Dtype
from trainer.config.schema import Config
from trainer.launch import process_group as launch
from trainer.launch.process_group import Cluster
from trainer.optim.table import no_decay_names

OURS, THEIRS, EAGER = "reprise", "transformers", "transformers, eager attention"
RATE, FIRST_LOSS = "tokens/s", "first loss"
# Presets of configs/model with the samples of an iteration, the iterations of a round, and the bound of the speed.
SIZES: Mapping[str, tuple[int, int, float]] = {"gpt2_tiny": (12, 30, 1.25), "gpt2_124m": (4, 3, 1.08)}
_LR = 1e-4

Step = Callable[[], float | torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subject."""
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=f"of {', '.join(SIZES)} (all)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads of all sides (all cores)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=[dtype.value for dtype in Dtype])
    parser.add_argument("--compile", action="store_true", help="compile all models")


def measure(options: argparse.Namespace, _: Path) -> list[str]:
    """Return the tables.

    Raises:
        SystemExit: if the losses of the first step differ.
    """
    lines = []
    for size in options.sizes or SIZES:
        with ExitStack() as stack:
            sides = {side: stack.enter_context(apart(_build, side, size, options)) for side in (OURS, THEIRS, EAGER)}
            rows = take_turns(sides, options.rounds, warm_up=1)
        goals = [Goal(f"speed, {size}", OURS, RATE, [THEIRS], SIZES[size][2], is_least=True)]
        goals.append(Goal(f"speed, {size}, to eager attention", OURS, RATE, [EAGER]))
        lines += [*report(rows, THEIRS, goals), ""]
        losses = [row["figures"][FIRST_LOSS] for row in rows if LEFT_OUT not in row]
        if max(losses) - min(losses) > (1e-5 if options.dtype == "float32" else 1e-2):
            raise SystemExit("\n".join([*lines, "The losses of the first step differ."]))
    return lines


def _build(side: str, size: str, options: argparse.Namespace) -> Callable[[], Figures]:
    """Return the measurement of a side, in a process of its own."""
    samples, steps, _ = SIZES[size]
    train = (f"train.dtype={options.dtype}", f"train.compile={str(options.compile).lower()}")
    config, cluster = config_of(size, *train, samples=samples), launch.start(options.device, deterministic=False)
    # The sides' own defaults differ where OMP_NUM_THREADS is set.
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    if side == OURS:
        values = their_model(config, cluster.device, None).state_dict()
        launch.keep_freed_memory(cluster.device)  # as the training loop does
        step = our_step(config, cluster, values)
    else:
        step = their_step(config, cluster, "eager" if side == EAGER else None)
    first_loss = float(step())
    return lambda: time_steps(step, config, steps, cluster.device) | {FIRST_LOSS: first_loss}


def time_steps(step: Step, config: Config, steps: int, device: torch.device, *, blocks: int = 1) -> Figures:
    """Time blocks of steps between two waits for the device; the median of the blocks counts."""
    seconds, before = list[float](), resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(blocks):
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        synchronize(device)
        seconds.append((time.perf_counter() - start) / steps)
    after, count, step_s = resource.getrusage(resource.RUSAGE_SELF), blocks * steps, statistics.median(seconds)
    return {
        "step, ms": step_s * 1e3,
        RATE: tokens_of(config) / step_s,
        "page faults": (after.ru_minflt - before.ru_minflt) / count,
        "system, ms": 1e3 * (after.ru_stime - before.ru_stime) / count,
        "last loss": float(loss),
    }


def synchronize(device: torch.device) -> None:
    """Wait for the work of a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def our_step(config: Config, cluster: Cluster, values: Mapping[str, torch.Tensor] | None = None) -> Step:
    """Return the trainer's step, from these values."""
    subject = build_subject(config, cluster)
    if values is not None:
        for name, parameter in subject.state.parts[0].model.named_parameters():
            value = values[name].flatten()
            parameter.detach().zero_().view(-1)[: value.numel()].copy_(value)  # rows that pad the vocabulary are last
    return subject.iteration()


def their_model(config: Config, device: torch.device, attention: str | None) -> nn.Module:
    """Return the model of transformers, with the same values each time."""
    torch.manual_seed(1234)
    table = dict(families.hf_config(config.model))
    table_config = AutoConfig.for_model(table.pop("model_type"), **table)
    with device:
        built: nn.Module = AutoModelForCausalLM.from_config(table_config, attn_implementation=attention).float()
    return built.train()


def their_step(config: Config, cluster: Cluster, attention: str | None = None) -> Step:
    """Return a step of transformers."""
    built = their_model(config, cluster.device, attention)

    def loss(module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # transformers shifts `labels` itself, which would leave out the last target of every sample.
        result: torch.Tensor = module(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss
        return result

    return _step(built, loss, no_decay_names(config.model), config, cluster)


def nanogpt_step(config: Config, cluster: Cluster) -> Step:
    """Return a step of GPT-2 in the way of nanoGPT."""
    torch.manual_seed(1234)
    with cluster.device:
        built = NanoGPT(config.model)
    no_decay = {name for name, parameter in built.named_parameters() if parameter.dim() < 2}
    return _step(built, lambda module, *tensors: module(*tensors), no_decay, config, cluster)


def _step(
    module: nn.Module,
    loss_of: Callable[..., torch.Tensor],
    no_decay: Collection[str],
    config: Config,
    cluster: Cluster,
) -> Step:
    """Return a step with fused AdamW, which decays the parameters that ours decays."""
    groups = [
        {"params": [p for name, p in module.named_parameters() if (name in no_decay) is not decays]}
        | {"weight_decay": 0.1 if decays else 0.0}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=_LR, betas=(0.9, 0.95), fused=True)
    called = torch.compile(module) if config.train.compile else module
    windows = windows_of(config, cluster.device)
    tokens, targets = windows[:, :-1], windows[:, 1:].contiguous()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(cluster.device.type, torch.bfloat16, enabled=config.train.dtype is Dtype.bfloat16):
            loss = loss_of(called, tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step
