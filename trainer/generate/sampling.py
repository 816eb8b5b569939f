"""Token-by-token generation: sampling of the next token from logits, and the end of the text.

A choice is a function of the seed and its number; torch's random generators are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from models.layers import splitmix64
from models.network import Model


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings.

    Args:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: number of likeliest tokens to sample from; 0 for all.
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0


def choose(logits: torch.Tensor, sampling: Sampling, *, number: int) -> int:
    """Return a token for one row of logits [vocabulary], the same for the same bits, whatever was drawn before.

    Args:
        number: the number of the choice, unique within a text.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.double().cpu() / sampling.temperature
    if 0 < sampling.top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    shares = scaled.softmax(-1).cumsum(-1)
    draw = (splitmix64(sampling.seed ^ splitmix64(number)) >> 11) * 2.0**-53  # in [0, 1), as doubles have 53 bits
    found = int(torch.searchsorted(shares, draw * shares[-1], right=True))
    return min(found, int(shares.argmax()))  # rounding may pass the last token with a nonzero share


def generate(
    next_token: Callable[[Sequence[int]], int | None], prompt: Sequence[int], *, max_new_tokens: int, end: int
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, until `end`, which is the last, or `max_new_tokens` of them.

    Args:
        next_token: returns the token after those so far; None ends the text.
    """
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        token = next_token(tokens)
        if token is None:
            return
        yield token
        if token == end:
            return
        tokens.append(token)


@torch.no_grad()
def continue_with(
    model: Model, prompt: Sequence[int], sampling: Sampling, *, max_new_tokens: int, end: int | None = None
) -> list[int]:
    """Return at most `max_new_tokens` tokens that an unsharded model generates after a prompt.

    The window is the last tokens, as many as the model has positions.

    Args:
        end: the token that ends the text; None for the model's.
    """
    config = model.config
    device = next(model.parameters()).device

    def next_token(tokens: Sequence[int]) -> int:
        window = torch.tensor([tokens[-config.max_position_embeddings :]], device=device)
        return choose(model(window)[0, -1, : config.vocab_size], sampling, number=len(tokens))

    end = config.eos_token_id if end is None else end
    return list(generate(next_token, prompt, max_new_tokens=max_new_tokens, end=end))
