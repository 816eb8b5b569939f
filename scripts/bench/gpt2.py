"""The measured GPT-2, in any size."""

from __future__ import annotations

from models.config import Family, ModelConfig


def gpt2_config(
    n_layer: int,
    n_head: int,
    n_embd: int,
    vocab_size: int,
    *,
    positions: int = 1024,
    dropout: float = 0.0,
    pad_vocab_multiple: int = 1,
) -> ModelConfig:
    """Return a GPT-2 whose last token begins and ends texts, as the original's does."""
    return ModelConfig(
        family=Family.gpt2,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_head,
        n_embd=n_embd,
        intermediate_size=4 * n_embd,
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        bos_token_id=vocab_size - 1,
        eos_token_id=vocab_size - 1,
        dropout=dropout,
        pad_vocab_multiple=pad_vocab_multiple,
    )
