"""The network interface: a language model, or a pipeline stage."""

from typing import cast

import torch
from torch import nn

from models.config import ModelConfig, Stage
from models.families import spec_of
from models.layers import Embedding, OutputLayer, tie


class Model(nn.Module):
    """A language model, or a pipeline stage.

    Called with int64 tokens [B, T] on the first stage, else hidden states [B, T, n_embd], and with `dropout_key`, an
    integer, an int64 element, or None for no dropout. `starts`, int64 [B, T], is the position at which each
    token's document begins; attention and positions then stay within documents. None is a single document. Returns
    logits [B, T, padded_vocab_size] on the last stage, else hidden states, in the compute dtype.
    """

    lm_head: OutputLayer  # on the last stage

    def __init__(self, config: ModelConfig, stage: Stage, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.stage = stage
        self.compute_dtype = compute_dtype
        self.activation_checkpointing = False
        # Into how many parts hidden states are cut along the sequence; sequence parallelism sets it from outside.
        self.sequence_shards = 1

    @property
    def blocks(self) -> nn.ModuleDict:
        """Return this stage's blocks by global layer number."""
        return cast(nn.ModuleDict, self.get_submodule(spec_of(self.config).blocks))

    def tie_weights(self) -> None:
        """Make the output weight the embedding Parameter itself, where both are here and tied.

        Materialising or wrapping a model separates the two: call again after each.
        """
        embedding = self.tied_embedding()
        if embedding is not None:
            tie(embedding, self.lm_head)

    def tied_embedding(self) -> Embedding | None:
        """Return the embedding whose table the output layer shares, or None."""
        if not (self.config.tie_word_embeddings and self.stage.first and self.stage.last):
            return None
        name, _, _ = spec_of(self.config).embedding.rpartition(".")
        return cast(Embedding, self.get_submodule(name))
