"""Model configuration: sizes, the stage on a process, and the on-disk form of tensors.

Nothing here imports torch or knows about training.
"""

from dataclasses import dataclass, field
from enum import Enum

# Marks `ModelConfig` fields added after the first checkpoints: records omit them at their default.
ADDED = "added"


class Family(Enum):
    """A model architecture."""

    gpt2 = "gpt2"
    llama3 = "llama3"
    qwen3 = "qwen3"


class Activation(Enum):
    """The GELU variant in GPT-2's MLP: the tanh approximation, as in OpenAI's GPT-2, or the exact error function."""

    gelu_tanh = "gelu_tanh"
    gelu = "gelu"


@dataclass
class RopeScaling:
    """RoPE scaling, which stretches rotary frequencies for contexts longer than the pre-training context.

    Source: `apply_scaling` in the LLaMA 3.1 reference code; `rope_type: llama3` in transformers.

    Args:
        factor: Divides the low frequencies.
        low_freq_factor: Wavelengths above `original_max_position_embeddings / low_freq_factor` are fully scaled.
        high_freq_factor: Wavelengths below `original_max_position_embeddings / high_freq_factor` are not scaled.
        original_max_position_embeddings: Pre-training context length, in tokens.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass
class LoraConfig:
    """Low-rank adapters on frozen projections: W x + (alpha / rank) B A x. Training updates A and B only.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; fields as in PEFT.

    Args:
        rank: Row count in A and column count in B; 0 trains the whole model.
        alpha: Numerator in the scale alpha / rank.
        dropout: Dropout probability for A's input.
        target_modules: Adapted projections, as suffixes of transformers' module names. null is PEFT's default:
            `c_attn` for gpt2, else `[q_proj,v_proj]`.
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: list[str] | None = None


@dataclass
class ModelConfig:
    """Model sizes, with the same fields for all families.

    Args:
        family: Model architecture.
        n_layer: Number of transformer blocks.
        n_head: Number of attention heads.
        n_kv_head: Number of key and value heads. Query heads share them if there are fewer than `n_head` (not gpt2).
        n_embd: Residual stream width.
        intermediate_size: MLP inner width.
        vocab_size: Number of tokens in the vocabulary.
        max_position_embeddings: Maximum sequence length, in tokens.
        bos_token_id: First token in a document.
        eos_token_id: Last token in a document.
        tie_word_embeddings: Share the embedding weight with the output layer.
        dropout: Dropout probability (gpt2 only).
        norm_eps: Epsilon added to the variance in norms.
        initializer_range: Standard deviation for initial weights.
        rope_theta: Rotary frequency base (not gpt2).
        rope_scaling: RoPE scaling for long contexts (llama3 only).
        pad_vocab_multiple: Round the vocabulary's rows up to this multiple, in memory only.
        activation: GELU variant (gpt2 only): `gelu_tanh`, as OpenAI's, or `gelu`, exact.
        head_dim: Attention head width (qwen3 only, required); elsewhere `n_embd / n_head`.
        stop_token_ids: Further end tokens for generation, beside `eos_token_id`. null adds none.
        lora: Low-rank adapters on a frozen base.
    """

    family: Family
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    tie_word_embeddings: bool = True
    dropout: float = 0.0
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    pad_vocab_multiple: int = 1
    activation: Activation = field(default=Activation.gelu_tanh, metadata={ADDED: True})
    head_dim: int | None = field(default=None, metadata={ADDED: True})
    stop_token_ids: list[int] | None = field(default=None, metadata={ADDED: True})
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the end tokens for generation."""
        return (self.eos_token_id, *(self.stop_token_ids or ()))

    @property
    def is_adapted(self) -> bool:
        """Return whether the model has adapters: its base is then frozen and in no checkpoint."""
        return self.lora.rank > 0

    @property
    def head_width(self) -> int:
        """Return the attention head width."""
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def padded_vocab_size(self) -> int:
        """Return the vocabulary's row count in memory: `vocab_size` rounded up to `pad_vocab_multiple`."""
        return -(-self.vocab_size // self.pad_vocab_multiple) * self.pad_vocab_multiple


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: a range of global layer numbers and, at the ends, more.

    The first stage holds the embeddings, the last the final norm and the output layer.
    """

    layers: range
    first: bool
    last: bool

    @classmethod
    def whole(cls, n_layer: int) -> "Stage":
        """Return the stage holding the complete model."""
        return cls(layers=range(n_layer), first=True, last=True)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's on-disk form and its relation to the live parameter.

    `shape` is transformers' shape. `view` is the same C-ordered bytes' shape with the live parameter's dimensions.
    Elements beyond `view` are padding, which is not stored.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]

    @classmethod
    def plain(cls, *shape: int) -> "StoredTensor":
        """Return a tensor with the same form in memory as on disk."""
        return cls(shape=shape, view=shape)


class InitialKind(Enum):
    """A distribution for initial values."""

    normal = "normal"
    uniform = "uniform"
    zeros = "zeros"
    ones = "ones"


@dataclass(frozen=True, slots=True)
class Initial:
    """A tensor's initial values. Random ones have mean 0.

    `scale` is a normal distribution's standard deviation, and a uniform distribution's largest value.
    """

    kind: InitialKind
    scale: float = 0.0


def common_problems(config: ModelConfig) -> list[str]:
    """Return every reason why no family can have these sizes; each names its key and value."""
    return _size_problems(config) + _head_problems(config) + _number_problems(config)


def _size_problems(config: ModelConfig) -> list[str]:
    names = ("n_layer", "n_head", "n_kv_head", "n_embd", "intermediate_size", "vocab_size", "max_position_embeddings")
    sizes = {name: getattr(config, name) for name in (*names, "pad_vocab_multiple")}
    messages = [f"model.{name}={size}: must be at least 1" for name, size in sizes.items() if size < 1]
    if config.n_layer > _MOST_LAYERS:
        messages.append(f"model.n_layer={config.n_layer}: must be at most {_MOST_LAYERS}")
    stops = [("stop_token_ids", token) for token in config.stop_token_ids or ()]
    for name, token in [("bos_token_id", config.bos_token_id), ("eos_token_id", config.eos_token_id), *stops]:
        if not 0 <= token < config.vocab_size:
            messages.append(
                f"model.{name}={token}: must be a token of the vocabulary, model.vocab_size={config.vocab_size}"
            )
    return messages


def _head_problems(config: ModelConfig) -> list[str]:
    messages = []
    if config.head_dim is not None and config.head_dim < 1:
        messages.append(f"model.head_dim={config.head_dim}: must be at least 1")
    elif config.head_dim is None and config.n_head >= 1 and config.n_embd % config.n_head:
        messages.append(f"model.n_head={config.n_head}: must divide model.n_embd={config.n_embd}")
    if config.n_kv_head >= 1 and config.n_head % config.n_kv_head:
        messages.append(f"model.n_kv_head={config.n_kv_head}: must divide model.n_head={config.n_head}")
    return messages


def _number_problems(config: ModelConfig) -> list[str]:
    messages = []
    if not 0 <= config.dropout < 1:
        messages.append(f"model.dropout={config.dropout}: must be at least 0 and below 1")
    for name, (least, most) in _RANGES.items():
        number = getattr(config, name)
        if not least <= number <= most:  # NaN is not
            messages.append(f"model.{name}={number}: must be a number from {least:g} to {most:g}")
    return messages


# Far beyond any model's values, and within float32's range.
_RANGES = {"norm_eps": (1e-30, 1.0), "initializer_range": (1e-30, 1e3), "rope_theta": (1e-3, 1e18)}
_MOST_FACTOR = 1e9
_MOST_LAYERS = 10_000  # all their tensors' names are listed


def rotary_problems(config: ModelConfig) -> list[str]:
    """Return every reason why these sizes rule out rotary positions."""
    messages = []
    if config.n_head >= 1 and config.head_width % 2:
        messages.append(
            f"model.n_embd={config.n_embd}: rotary positions need an even width per head, "
            f"model.n_head={config.n_head} makes it {config.head_width}"
            if config.head_dim is None
            else f"model.head_dim={config.head_dim}: rotary positions need an even width per head"
        )
    return messages if config.rope_scaling is None else messages + _rope_scaling_problems(config.rope_scaling)


def _rope_scaling_problems(scaling: RopeScaling) -> list[str]:
    messages = []
    if not 1 <= scaling.factor <= _MOST_FACTOR:
        messages.append(f"model.rope_scaling.factor={scaling.factor}: must be a number from 1 to {_MOST_FACTOR:g}")
    if not 0 < scaling.low_freq_factor < scaling.high_freq_factor <= _MOST_FACTOR:
        messages.append(
            f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor}: must be above "
            f"model.rope_scaling.low_freq_factor={scaling.low_freq_factor}, both above 0 and at most {_MOST_FACTOR:g}"
        )
    if scaling.original_max_position_embeddings < 1:
        size = scaling.original_max_position_embeddings
        messages.append(f"model.rope_scaling.original_max_position_embeddings={size}: must be at least 1")
    return messages
