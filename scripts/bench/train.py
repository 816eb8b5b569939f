"""The training step: ours against transformers on the same values, tokens and targets, each in its own process.

A step is zero_grad, forward, loss, backward, clipping of the norm and fused AdamW. Our side is the trainer's
`train_step`; the other side is the loop from transformers' documentation, with its default attention and with its
eager attention. The losses of the first step have to agree.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from models import families
from scripts.bench.harness import LEFT_OUT, Figures, Goal, Side, apart, report, take_turns
from scripts.bench.nanogpt import NanoGPT
from scripts.bench.probe import device_peak, synchronize
from scripts.bench.subject import build_subject, config_of, tokens_of, windows_of
from trainer.config.dtype import Dtype
from trainer.config.schema import Config
from trainer.launch import process_group as launch
from trainer.launch.device import CPU, device_name
from trainer.launch.process_group import Cluster
from trainer.metrics.run_log import peak_flops
from trainer.optim.table import no_decay_names

OURS, THEIRS, EAGER = "reprise", "transformers", "transformers, eager attention"
NANOGPT = "nanoGPT's way"
STEP, RATE, FIRST_LOSS = "step, ms", "tokens/s", "first loss"
# Presets of configs/model with the samples of an iteration, the iterations of a round, and the bound of the time.
SIZES: Mapping[str, tuple[int, int, float]] = {"gpt2_tiny": (12, 30, 0.8), "gpt2_124m": (4, 3, 0.926)}
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
        samples, steps, bound = SIZES[size]
        train = (f"train.dtype={options.dtype}", f"train.compile={str(options.compile).lower()}")
        common = (config_of(size, *train, samples=samples), options.device, options.threads, steps)
        with ExitStack() as stack:
            sides = {side: stack.enter_context(apart(build_side, side, *common)) for side in (OURS, THEIRS, EAGER)}
            rows = take_turns(sides, options.rounds, warm_up=1)
        lines += [*report(rows, THEIRS, [Goal(f"step, {size}", OURS, STEP, THEIRS, bound)]), ""]
        losses = [row["figures"][FIRST_LOSS] for row in rows if LEFT_OUT not in row]
        if max(losses) - min(losses) > (1e-5 if options.dtype == "float32" else 1e-2):
            raise SystemExit("\n".join([*lines, "The losses of the first step differ."]))
    return lines


def build_side(side: str, config: Config, device: str, threads: int, steps: int) -> Side:
    """Return the measurement of a side after its first step, in a process of its own."""
    # The sides' own defaults differ where OMP_NUM_THREADS is set.
    cluster = launch.start(device, deterministic=False, threads=threads, variables={})
    if cluster.device.type != CPU:
        torch.set_float32_matmul_precision("high")  # as in nanoGPT; what is left in float32 is small on every side
    builds: dict[str, Callable[[Config, Cluster], Step]] = {
        OURS: _our_step,
        NANOGPT: _nanogpt_step,
        THEIRS: _their_step,
        EAGER: partial(_their_step, attention="eager"),
    }
    step = builds[side](config, cluster)
    first_loss = float(step())
    return lambda: _time(step, config, steps, cluster.device) | {FIRST_LOSS: first_loss}


def _time(step: Step, config: Config, steps: int, device: torch.device) -> Figures:
    peak, start = device_peak(device), time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    step_s = (time.perf_counter() - start) / steps
    figures, flops = {STEP: step_s * 1e3, RATE: tokens_of(config) / step_s, **peak()}, peak_flops(device_name(device))
    if flops is not None:
        needed = families.flops_per_token(config.model, config.train.seq_length)
        figures["MFU, %"] = 100 * figures[RATE] * needed / flops
    return figures


def _our_step(config: Config, cluster: Cluster) -> Step:
    """Return the trainer's step, from the values of transformers."""
    values = _their_model(config, cluster.device, None).state_dict()
    launch.keep_freed_memory(cluster.device)  # as the training loop does
    subject = build_subject(config, cluster)
    for name, parameter in subject.state.parts[0].model.named_parameters():
        value = values[name].flatten()
        parameter.detach().zero_().view(-1)[: value.numel()].copy_(value)  # rows that pad the vocabulary are last
    return subject.iteration()


def _their_model(config: Config, device: torch.device, attention: str | None) -> nn.Module:
    """Return the model of transformers, with the same values each time."""
    torch.manual_seed(1234)
    table = dict(families.hf_config(config.model))
    table_config = AutoConfig.for_model(table.pop("model_type"), **table)
    with device:
        built: nn.Module = AutoModelForCausalLM.from_config(table_config, attn_implementation=attention).float()
    return built.train()


def _their_step(config: Config, cluster: Cluster, attention: str | None = None) -> Step:
    """Return a step of transformers."""
    built = _their_model(config, cluster.device, attention)

    def loss(module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # transformers shifts `labels` itself, which would leave out the last target of every sample.
        result: torch.Tensor = module(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss
        return result

    return _step(built, loss, no_decay_names(config.model), config, cluster)


def _nanogpt_step(config: Config, cluster: Cluster) -> Step:
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
