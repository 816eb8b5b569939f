"""The step of training on a device: ours, nanoGPT's way and that of transformers, each compiled, in bfloat16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from models import families
from models.config import Family
from scripts.bench.cuda_group import Device, Figures, MeasuredSide, Setting, build_training, random_windows, step_of
from scripts.bench.cuda_variants import VARIANTS, variant
from scripts.bench.nanogpt import NanoGPT, adamw
from trainer.launch.device import device_name
from trainer.launch.process_group import Cluster
from trainer.metrics.run_log import peak_flops

OURS, NANOGPT, TRANSFORMERS = "reprise", "nanoGPT's way", "transformers"
_LR = 1e-4


def step_sides(setting: Setting, cluster: Cluster) -> Mapping[str, MeasuredSide]:
    """Return the sides of a model; nanoGPT has GPT-2 alone."""
    device = Device(cluster.device)

    def side(build: Callable[[], Callable[[], object]], least_s: float) -> MeasuredSide:
        return MeasuredSide(partial(_measure, build, setting, device), least_s)

    sides = {OURS: side(partial(_ours, setting, cluster), 40)}
    if setting.model.family is Family.gpt2:
        sides[NANOGPT] = side(partial(_nanogpt, setting, device), 60)
    sides[TRANSFORMERS] = side(partial(_transformers, setting, device), 60)
    return sides | {name: side(partial(variant, name, setting, cluster), 40) for name in VARIANTS}


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
    figures = {
        "step_s": step_s,
        "least_s": min(seconds),
        "most_s": max(seconds),
        "tokens_per_s": setting.tokens / step_s,
        "warm_up_s": warm_up_s,
        "peak_bytes": device.peak_bytes(),
    }
    peak = peak_flops(device_name(device.device))
    if peak is not None:
        figures["mfu"] = figures["tokens_per_s"] * families.flops_per_token(setting.model, setting.seq_length) / peak
    return figures


def _ours(setting: Setting, cluster: Cluster) -> Callable[[], object]:
    return step_of(build_training(setting, cluster), setting)


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
