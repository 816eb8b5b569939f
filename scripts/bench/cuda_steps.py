"""The step of training on a device: ours, nanoGPT's way and that of transformers, each compiled, in bfloat16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from models import families
from models.config import Family
from models.layers import OutputLayer, token_loss
from scripts.bench.cuda_group import Device, Figures, MeasuredSide, Setting, build_training, random_windows, step_of
from scripts.bench.nanogpt import NanoGPT, adamw
from trainer.launch.device import device_name
from trainer.launch.process_group import Cluster
from trainer.metrics.run_log import peak_flops

OURS, NANOGPT, TRANSFORMERS = "reprise", "nanoGPT's way", "transformers"
# Changes of our step that are not in the trainer: each has to be faster on a device first.
LOSS, WHOLE, CHUNKS = "reprise, loss compiled", "reprise, whole model and loss compiled", "reprise, loss in chunks"
VARIANTS = (LOSS, WHOLE, CHUNKS)
_LR = 1e-4
_CHUNKS = 4  # of the sequence


def step_sides(setting: Setting, cluster: Cluster) -> Mapping[str, MeasuredSide]:
    """Return the sides of a model; nanoGPT has GPT-2 alone."""
    device = Device(cluster.device)

    def side(build: Callable[[], Callable[[], object]], least_s: float) -> MeasuredSide:
        return MeasuredSide(partial(_measure, build, setting, device), least_s)

    sides = {OURS: side(partial(_ours, setting, cluster), 40)}
    if setting.model.family is Family.gpt2:
        sides[NANOGPT] = side(partial(_nanogpt, setting, device), 60)
    sides[TRANSFORMERS] = side(partial(_transformers, setting, device), 60)
    return sides | {name: side(partial(_variant, name, setting, cluster), 40) for name in VARIANTS}


def _measure(build: Callable[[], Callable[[], object]], setting: Setting, device: Device) -> Figures:
    """Build a side, warm it up and time blocks of steps."""
    start = time.perf_counter()
    step = build()
    for _ in range(3):
        step()
    device.synchronize()
    warm_up_s = time.perf_counter() - start
    device.reset_peak()
    seconds = []
    for _ in range(setting.blocks):
        start = time.perf_counter()
        for _ in range(setting.steps):
            step()
        device.synchronize()
        seconds.append((time.perf_counter() - start) / setting.steps)
    step_s = statistics.median(seconds)
    found = {
        "step_s": step_s,
        "least_s": min(seconds),
        "most_s": max(seconds),
        "tokens_per_s": setting.tokens / step_s,
        "warm_up_s": warm_up_s,
        "peak_bytes": device.peak_bytes(),
    }
    peak = peak_flops(device_name(device.device))
    if peak is not None:
        found["mfu"] = found["tokens_per_s"] * families.flops_per_token(setting.model, setting.seq_length) / peak
    return found


def _ours(setting: Setting, cluster: Cluster) -> Callable[[], object]:
    return step_of(build_training(setting, cluster), setting)


def _variant(name: str, setting: Setting, cluster: Cluster) -> Callable[[], object]:
    """Return our step with one change of its forward pass."""
    compiles_blocks = setting.compiles and name != WHOLE
    subject = build_training(replace(setting, compiles=compiles_blocks), cluster)
    (part,) = subject.state.parts
    compiled: Callable[..., Any] = torch.compile if setting.compiles else lambda function: function
    if name == WHOLE and setting.compiles:
        part.model.compile()
    loss = _in_chunks(part.model.lm_head, compiled) if name == CHUNKS else compiled(token_loss)
    return step_of(replace(subject, context=replace(subject.context, loss=loss)), setting)


def _in_chunks(head: OutputLayer, compiled: Callable[..., Any]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a loss that makes the logits itself, chunk by chunk and once more in the backward pass; `head` makes none.

    The loss is the mean of the means of the chunks, which are equally long where their number divides the sequence.
    """
    make, tables = head.forward, list[torch.Tensor | None]()

    def keep(x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        tables[:] = [table]
        return x

    head.forward = keep  # type: ignore[method-assign]

    @compiled
    def of_chunk(x: torch.Tensor, targets: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        return token_loss(make(x, table), targets)

    def loss(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts = zip(x.chunk(_CHUNKS, 1), targets.chunk(_CHUNKS, 1), strict=True)
        losses = [checkpoint(of_chunk, *part, tables[0], use_reentrant=False) for part in parts]
        return torch.stack(losses).mean()

    return loss


def _nanogpt(setting: Setting, device: Device) -> Callable[[], object]:
    torch.manual_seed(1234)
    with device.device:
        model = NanoGPT(setting.model)
    optimizer = adamw(model, _LR)
    called = torch.compile(model) if setting.compiles else model
    windows = random_windows(setting, device.device)

    def step() -> torch.Tensor:
        with torch.autocast(device.device.type, torch.bfloat16):
            loss: torch.Tensor = called(windows[:, :-1], windows[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        _update(model, optimizer)
        return loss

    return step


def _transformers(setting: Setting, device: Device) -> Callable[[], object]:
    torch.manual_seed(1234)
    table = dict(families.hf_config(setting.model))
    config = AutoConfig.for_model(table.pop("model_type"), **table)
    with device.device:
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    called = torch.compile(model) if setting.compiles else model
    tokens = random_windows(setting, device.device)[:, :-1].contiguous()

    def step() -> torch.Tensor:
        with torch.autocast(device.device.type, torch.bfloat16):
            loss: torch.Tensor = called(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        _update(model, optimizer)
        return loss

    return step


def _update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
