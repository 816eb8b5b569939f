"""Token-by-token generation: samples the next token from logits, and ends the text.

A choice is a function of the seed and the choice number; torch's own random generator is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.layers import splitmix64
from models.network import Model


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings.

    Args:
        temperature: Divides the logits. 0 always takes the likeliest token.
        top_k: How many of the likeliest tokens to sample from. 0 means all.
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0


def choose(logits: torch.Tensor, sampling: Sampling, *, number: int) -> int:
    """Choose a token from logits [vocabulary]. Equal logits, settings and number give equal tokens.

    Args:
        number: The choice number, unique within a text.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.double().cpu() / sampling.temperature
    if 0 < sampling.top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    generator = torch.Generator().manual_seed(splitmix64(sampling.seed ^ splitmix64(number)))
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))


@torch.no_grad()
def continue_with(model: Model, prompt: Sequence[int], sampling: Sampling, *, max_new_tokens: int) -> list[int]:
    """Generate at most `max_new_tokens` tokens after a prompt, up to an end of text, with an unsharded model.

    The model sees the last tokens, up to its maximum position count.
    """
    config, tokens = model.config, list(prompt)
    device = next(model.parameters()).device
    for _ in range(max_new_tokens):
        window = torch.tensor([tokens[-config.max_position_embeddings :]], device=device)
        tokens.append(choose(model(window)[0, -1, : config.vocab_size], sampling, number=len(tokens)))
        if tokens[-1] in config.end_tokens:
            break
    return tokens[len(prompt) :]
