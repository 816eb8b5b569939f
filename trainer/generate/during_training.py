"""Text samples during training. A sample changes neither the state nor any random generator of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from reprise.live_tensors import free_gathered_parameters
from trainer.generate.sampling import Sampling, choose, generate
from trainer.launch.process_group import Cluster
from trainer.parallel.context import ParallelContext
from trainer.run.state import TrainerState


@dataclass(frozen=True, slots=True)
class Sampler:
    """The settings of a sample.

    Args:
        prompt: at least one token.
        max_new_tokens: the maximum; the end of text may come earlier.
        seq_length: tokens of a forward pass, as in training; longer texts are cut at the front.
        rows: identical rows of a forward pass: 1, or as in training where another number would be compiled again.
        decode: converts tokens to text; used on rank 0 only.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    seq_length: int
    rows: int
    seed: int
    decode: Callable[[Sequence[int]], str]


@torch.no_grad()
def sample(
    sampler: Sampler,
    state: TrainerState,
    *,
    context: ParallelContext,
    cluster: Cluster,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[int] | None:
    """Return the tokens that the model generates after the prompt, equal on all ranks. Collective.

    Tokens are sampled at temperature 1 with a seed made of the run's seed and the iteration.

    Args:
        should_stop: called at every token; if it returns True on any rank, all ranks stop and return None.
    """
    sampling = Sampling(temperature=1.0, seed=sampler.seed ^ (state.progress.iteration << 32))
    is_stopped = False

    def next_token(tokens: Sequence[int]) -> int | None:
        nonlocal is_stopped
        logits = _last_logits(sampler, state, tokens[-sampler.seq_length :], context)
        token = -1 if logits is None else choose(logits, sampling, number=len(tokens))
        # Replicas may round differently on other hardware: all use the choice of the first rank that has logits.
        rows = cluster.gather([float(token), float(should_stop())])
        is_stopped = any(row[1] for row in rows)
        return None if is_stopped else next(int(row[0]) for row in rows if row[0] >= 0)

    end = state.config.eos_token_id
    found = list(generate(next_token, sampler.prompt, max_new_tokens=sampler.max_new_tokens, end=end))
    for part in state.parts:
        free_gathered_parameters(part.model)
    return None if is_stopped else found


def _last_logits(
    sampler: Sampler, state: TrainerState, tokens: Sequence[int], context: ParallelContext
) -> torch.Tensor | None:
    """Return the logits [vocabulary] after the last token, or None on ranks that have none.

    The window has the shape of training and is padded after the tokens; attention is causal.
    """
    device = next(state.parts[0].model.parameters()).device
    window = torch.zeros(1, sampler.seq_length + 1, dtype=torch.int64, device=device)
    window[0, : len(tokens)] = torch.tensor(tokens)
    at = len(tokens) - 1
    if context.pipeline is not None:
        with context.loss_context():
            found = context.pipeline.logits(window, at)
        if found is None:
            return None
    else:
        found = state.parts[0].model(window[:, :-1].expand(sampler.rows, -1))[:1, at]
    return context.gather_logits(found)[0, : state.config.vocab_size]
