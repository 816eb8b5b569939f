"""Measure blends and document masks: `python -m scripts.bench.data [--rounds N]`.

Seconds are those of the processor, so that other programs on the machine hardly count. The blend has 50 sources with
weights that need the longest period, and 10^9 samples in files without content. The mask is that of documents of 256
tokens; passes with and without it take turns.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from models.build import build_model
from models.config import ModelConfig, Stage
from models.layers import token_loss
from models.network import Model
from scripts.bench.gpt2 import gpt2_config
from scripts.bench.machine import describe
from trainer.data.batches import OrderedSamples, Samples
from trainer.data.blend import Blend
from trainer.data.data_file import DataFile
from trainer.data.token_file import TokenFile

SOURCES, SAMPLES, BATCH, LENGTH, DOCUMENT = 50, 10**9, 512, 128, 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the figures and return 0."""
    parser = argparse.ArgumentParser(prog="bench_data")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="rounds of each figure (%(default)d)")
    rounds = parser.parse_args(arguments).rounds
    print("\n".join(describe(Path.cwd())))
    start_s, batch_s = measure_blend(rounds)
    print(f"blend of {SOURCES} sources, {SAMPLES:,} samples: start {start_s * 1e3:.1f} ms", end="")
    print(f", a batch of {BATCH} samples of {LENGTH} tokens {batch_s * 1e3:.2f} ms")
    torch.set_num_threads(1)
    for samples, length in ((8, 256), (2, 1024), (1, 2048)):
        ratios = measure_mask(samples, length, rounds)
        low, median, high = (f"{ratio:.3f}" for ratio in statistics.quantiles(ratios, n=4))
        print(f"document mask, {samples} x {length}: {median} ({low} to {high}) times the time without")
    return 0


def measure_blend(rounds: int) -> tuple[float, float]:
    """Return the seconds of a start, and the median of a batch at random positions."""
    rng = random.Random(1)
    share = SAMPLES // SOURCES
    sources = [Samples([_empty_file(share * LENGTH + 1, f"s{n}")], seq_length=LENGTH) for n in range(SOURCES)]
    start = time.process_time()
    blended = OrderedSamples(sources, Blend([Fraction(str(rng.random())) for _ in sources]))
    start_s = time.process_time() - start
    seconds = []
    for _ in range(rounds):
        first = rng.randrange(SAMPLES)
        start = time.process_time()
        blended.windows(blended.sample_ids(np.arange(first, first + BATCH), 1))
        seconds.append(time.process_time() - start)
    return start_s, statistics.median(seconds)


def _empty_file(count: int, name: str) -> TokenFile:
    descriptor = os.memfd_create(name)
    os.truncate(descriptor, 2 * count)
    return TokenFile(DataFile(Path(name), descriptor), np.dtype(np.uint16), count, first_byte=0)


def measure_mask(samples: int, length: int, rounds: int) -> list[float]:
    """Return the ratio of a forward and backward pass with a mask to a pass without, of each round."""
    model = _model(gpt2_config(4, 4, 256, 257, positions=length))
    tokens = torch.randint(257, (samples, length + 1))
    starts = (torch.arange(length) // DOCUMENT * DOCUMENT).expand(samples, -1)
    ratios = []
    for _ in range(rounds + 1):
        plain = _seconds(lambda: token_loss(model(tokens[:, :-1]), tokens[:, 1:]))
        masked = _seconds(lambda: token_loss(model(tokens[:, :-1], starts=starts), tokens[:, 1:]))
        ratios.append(masked / plain)
    return ratios[1:]


def _model(config: ModelConfig) -> Model:
    model = build_model(config, stage=Stage.whole(config.n_layer), compute_dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def _seconds(loss: Callable[[], torch.Tensor]) -> float:
    start = time.process_time()
    loss().backward()  # type: ignore[no-untyped-call]
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
