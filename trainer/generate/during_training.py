"""Text samples during training. Sampling changes neither the run's state nor its random generators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from reprise.tensors import free_gathered_parameters
from trainer.generate.sampling import Sampling, choose, generate
from trainer.launch.process_group import Cluster
from trainer.parallel.context import ParallelContext
from trainer.run.state import TrainerState


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sample settings, including the interval.

    Args:
        interval: Iterations between samples. 0 disables them.
        prompt: Prompt tokens, at least 1.
        max_new_tokens: Maximum token count. The end-of-text token may come earlier.
        seq_length: Tokens in a forward pass, as in training. Longer texts are cut at the front.
        rows: Identical rows in a forward pass: 1, or as in training if another count would trigger a recompilation.
        decode: Converts tokens to text. Used on rank 0 only.
    """

    interval: int
    prompt: Sequence[int]
    max_new_tokens: int
    seq_length: int
    rows: int
    seed: int
    decode: Callable[[Sequence[int]], str]

    def is_due(self, iteration: int) -> bool:
        """Return whether the run logs a sample after `iteration`."""
        return self.interval > 0 and iteration % self.interval == 0


NO_SAMPLES = Sampler(interval=0, prompt=(0,), max_new_tokens=0, seq_length=1, rows=1, seed=0, decode=str)


@torch.no_grad()
def sample(
    sampler: Sampler,
    state: TrainerState,
    *,
    context: ParallelContext,
    cluster: Cluster,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[int] | None:
    """Generate tokens after the prompt, equal on all ranks. A collective call.

    Tokens are sampled at temperature 1 with a seed derived from the run's seed and the iteration.

    Args:
        should_stop: Called at every token. If it returns True on any rank, all ranks stop and return None.
    """
    sampling = Sampling(temperature=1.0, seed=sampler.seed ^ (state.progress.iteration << 32))
    is_stopped = False

    def next_token(tokens: Sequence[int]) -> int | None:
        nonlocal is_stopped
        logits = _last_logits(sampler, state, tokens[-sampler.seq_length :], context)
        token = choose(logits, sampling, number=len(tokens))
        # Replicas may round differently on other hardware: all ranks use rank 0's choice.
        numbers = torch.tensor([0 if cluster.rank else token, should_stop()], device=cluster.device)
        first, stop = cluster.largest(numbers).tolist()
        is_stopped = bool(stop)
        return None if is_stopped else first

    ends = state.config.end_tokens
    generated = list(generate(next_token, sampler.prompt, max_new_tokens=sampler.max_new_tokens, ends=ends))
    for part in state.parts:
        free_gathered_parameters(part.model)
    return None if is_stopped else generated


def _last_logits(
    sampler: Sampler, state: TrainerState, tokens: Sequence[int], context: ParallelContext
) -> torch.Tensor:
    """Return the logits [vocabulary] after the last token.

    The window has the training shape and is padded at the end; attention is causal.
    """
    device = next(state.parts[0].model.parameters()).device
    window = torch.zeros(1, sampler.seq_length, dtype=torch.int64, device=device)
    window[0, : len(tokens)] = torch.tensor(tokens)
    logits = state.parts[0].model(window.expand(sampler.rows, -1))[:1, len(tokens) - 1]
    return context.gather_logits(logits)[0, : state.config.vocab_size]
