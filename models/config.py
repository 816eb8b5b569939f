"""The description of a model: its sizes, the part of it on a process, and how its tensors lie on disk.

No module of torch's lives here, and nothing about training.
"""

from dataclasses import dataclass, field
from enum import Enum

# Metadata of a field of `ModelConfig` that the first checkpoints lack: records leave it out where it has its default.
ADDED = "added"


class Family(Enum):
    """A model architecture."""

    gpt2 = "gpt2"
    llama3 = "llama3"
    qwen3 = "qwen3"


class Activation(Enum):
    """The form of the GELU in GPT-2's MLP: by a tanh, as OpenAI's GPT-2 has it, or exact, by the error function."""

    gelu_tanh = "gelu_tanh"
    gelu = "gelu"


@dataclass
class RopeScaling:
    """Stretch rotary frequencies for contexts longer than those of pre-training.

    Source: LLaMA 3.1, `apply_scaling` of the reference code; `rope_type: llama3` in transformers.

    Args:
        factor: divisor of low frequencies.
        low_freq_factor: wavelengths above `original_max_position_embeddings` divided by it are fully scaled.
        high_freq_factor: wavelengths below `original_max_position_embeddings` divided by it are not scaled.
        original_max_position_embeddings: tokens of a context in pre-training.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass
class LoraConfig:
    """Low-rank adapters on frozen projections: W x + (alpha / rank) B A x, of which A and B are trained.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; meanings are those of PEFT.

    Args:
        rank: rows of A and columns of B; 0 trains the whole model.
        alpha: numerator of the scale.
        dropout: dropout probability of A's input.
        target_modules: projections with adapters, by ends of transformers' module names; null is PEFT's choice:
            `c_attn` for gpt2, else `[q_proj,v_proj]`.
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: list[str] | None = None


@dataclass
class ModelConfig:
    """Sizes of a model, the same for all families.

    Args:
        family: architecture.
        n_layer: transformer blocks.
        n_head: attention heads.
        n_kv_head: key and value heads; fewer than `n_head` are shared (not gpt2).
        n_embd: width of the residual stream.
        intermediate_size: width inside the MLP.
        vocab_size: tokens of the vocabulary.
        max_position_embeddings: maximum tokens of a sequence.
        bos_token_id: first token of a document.
        eos_token_id: last token of a document.
        tie_word_embeddings: use the embedding as the output layer.
        dropout: dropout probability (gpt2 only).
        norm_eps: added to the variance in norms.
        initializer_range: standard deviation of initial weights.
        rope_theta: base of rotary frequencies (not gpt2).
        rope_scaling: rotary scaling for long contexts (llama3 only).
        pad_vocab_multiple: round the vocabulary's rows up to this multiple, in memory only.
        activation: GELU (gpt2 only): `gelu_tanh`, as OpenAI's, or `gelu`, exact.
        head_dim: width of a head (qwen3 only, required); elsewhere `n_embd / n_head`.
        stop_token_ids: tokens beside `eos_token_id` that end a generated text; null for none.
        lora: low-rank adapters on a frozen base.
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
        """Return the tokens that end a generated text."""
        return (self.eos_token_id, *(self.stop_token_ids or ()))

    @property
    def is_adapted(self) -> bool:
        """Return whether the model has adapters: its base is then frozen and in no checkpoint."""
        return self.lora.rank > 0

    @property
    def head_width(self) -> int:
        """Return the width of an attention head."""
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def padded_vocab_size(self) -> int:
        """Return the rows of the vocabulary in memory: `vocab_size` rounded up to `pad_vocab_multiple`."""
        return -(-self.vocab_size // self.pad_vocab_multiple) * self.pad_vocab_multiple


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model on a process: a range of global layer numbers and, at the ends, more.

    The first stage holds the embeddings, the last the final norm and the output layer.
    """

    layers: range
    first: bool
    last: bool

    @classmethod
    def whole(cls, n_layer: int) -> "Stage":
        """Return the complete model as a stage."""
        return cls(layers=range(n_layer), first=True, last=True)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The form of a tensor on disk and its relation to the live parameter.

    `shape` is transformers' shape. `view` names the same bytes, in C order, with the dimensions of the live parameter,
    of which it is the leading box: what a live parameter holds beyond `view` is padding and not stored.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]

    @classmethod
    def plain(cls, *shape: int) -> "StoredTensor":
        """Return a tensor with the same form in memory as on disk."""
        return cls(shape=shape, view=shape)


class InitialKind(Enum):
    """A distribution of initial values."""

    normal = "normal"
    uniform = "uniform"
    zeros = "zeros"
    ones = "ones"


@dataclass(frozen=True, slots=True)
class Initial:
    """Initial values of a tensor, with mean 0 where they are random.

    `std` is the standard deviation of the normal distribution, `bound` the largest value of the uniform distribution.
    """

    kind: InitialKind
    std: float = 0.0
    bound: float = 0.0


def common_problems(config: ModelConfig) -> list[str]:
    """Return every reason why no family can have a model of these sizes; each names its key and value."""
    return _size_problems(config) + _head_problems(config) + _number_problems(config)


def _size_problems(config: ModelConfig) -> list[str]:
    names = ("n_layer", "n_head", "n_kv_head", "n_embd", "intermediate_size", "vocab_size", "max_position_embeddings")
    sizes = {name: getattr(config, name) for name in (*names, "pad_vocab_multiple")}
    messages = [f"model.{name}={size}: must be at least 1" for name, size in sizes.items() if size < 1]
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


# Far beyond what any model has, and within what float32 computes with.
_RANGES = {"norm_eps": (1e-30, 1.0), "initializer_range": (1e-30, 1e3), "rope_theta": (1e-3, 1e18)}
_MOST_FACTOR = 1e9


def rotary_problems(config: ModelConfig) -> list[str]:
    """Return every reason why positions cannot be rotations in a model of these sizes."""
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
