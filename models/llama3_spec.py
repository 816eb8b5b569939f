"""LLaMA-3 as data, under transformers' names and orientation. The network is in `llama3`.

Sources: Dubey et al. 2024, "The Llama 3 Herd of Models"; transformers' `LlamaForCausalLM`.
"""

from models.config import Initial, InitialKind, ModelConfig, StoredTensor
from models.hf_config import HfConfig, HfConstant, HfField, HfRope
from models.megatron_names import ABSENT, POSITIONS, MegatronForm, MegatronNames, MegatronPart, norm_parts
from models.spec import Cut, FamilySpec, TensorParallelPlan

_plain = StoredTensor.plain


def _first(config: ModelConfig) -> dict[str, StoredTensor]:
    return {"model.embed_tokens.weight": _plain(config.vocab_size, config.n_embd)}


def _block(config: ModelConfig) -> dict[str, StoredTensor]:
    width, inner = config.n_embd, config.intermediate_size
    q_width, kv_width = config.n_head * config.head_width, config.n_kv_head * config.head_width
    return {
        "self_attn.q_proj.weight": _plain(q_width, width),
        "self_attn.k_proj.weight": _plain(kv_width, width),
        "self_attn.v_proj.weight": _plain(kv_width, width),
        "self_attn.o_proj.weight": _plain(width, q_width),
        "mlp.gate_proj.weight": _plain(inner, width),
        "mlp.up_proj.weight": _plain(inner, width),
        "mlp.down_proj.weight": _plain(width, inner),
        "input_layernorm.weight": _plain(width),
        "post_attention_layernorm.weight": _plain(width),
    }


def _last(config: ModelConfig) -> dict[str, StoredTensor]:
    return {"model.norm.weight": _plain(config.n_embd)}


def _initial(name: str, config: ModelConfig) -> Initial:
    """Return initial values as transformers' `_init_weights` sets them."""
    if name.endswith("norm.weight"):
        return Initial(InitialKind.ones)
    return Initial(InitialKind.normal, config.initializer_range)


_PLAN = TensorParallelPlan(
    ends={"model.embed_tokens": Cut.embedding, "model.norm": Cut.sequence_norm, "lm_head": Cut.output},
    block={
        "self_attn": Cut.gather,
        "self_attn.q_proj": Cut.columns,
        "self_attn.k_proj": Cut.columns,
        "self_attn.v_proj": Cut.columns,
        "self_attn.o_proj": Cut.rows,
        "mlp": Cut.gather,
        "mlp.gate_proj": Cut.columns,
        "mlp.up_proj": Cut.columns,
        "mlp.down_proj": Cut.rows,
        "input_layernorm": Cut.sequence_norm,
        "post_attention_layernorm": Cut.sequence_norm,
    },
)


def hf_members(
    n_kv_head: HfField, head_dim: HfField | HfConstant, inner_width: int, vocab_size: int, positions: int, unused: str
) -> tuple[HfField | HfConstant | HfRope, ...]:
    """Return the `config.json` members that LLaMA shares with its relatives, in file order.

    Args:
        inner_width, vocab_size, positions: The values for a file without them.
        unused: A member that must be false.
    """
    return (
        HfConstant("hidden_act", ("silu", "swish")),
        HfField("n_layer", "num_hidden_layers", 32),
        HfField("n_head", "num_attention_heads", 32),
        n_kv_head,
        head_dim,
        HfField("n_embd", "hidden_size", 4096),
        HfField("intermediate_size", "intermediate_size", inner_width),
        HfField("vocab_size", "vocab_size", vocab_size),
        HfField("max_position_embeddings", "max_position_embeddings", positions),
        HfField("norm_eps", "rms_norm_eps", 1e-6),
        HfField("initializer_range", "initializer_range", 0.02),
        HfConstant("attention_bias", (False,)),
        HfConstant(unused, (False,)),
        HfRope(),
        HfField("tie_word_embeddings", "tie_word_embeddings", False),
    )


_HF = HfConfig(
    "LlamaForCausalLM",
    "llama",
    hf_members(
        HfField("n_kv_head", "num_key_value_heads", lambda values: values["n_head"]),
        HfConstant("head_dim", lambda values: (values["n_embd"] // values["n_head"], None)),
        inner_width=11008,
        vocab_size=32000,
        positions=2048,
        unused="mlp_bias",
    ),
    tokens={"bos_token_id": 1, "eos_token_id": 2},
    neutral={"attention_dropout": 0.0},
)
MEGATRON = MegatronNames(
    arguments={
        POSITIONS: ("rope", None),
        "normalization": ("RMSNorm",),
        "swiglu": (True,),
        "add_bias_linear": (False,),
        "add_qkv_bias": ABSENT,
        "qk_layernorm": ABSENT,
    },
    first=(
        MegatronPart(
            "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), MegatronForm.vocabulary, cut=0
        ),
    ),
    block=(
        *norm_parts("self_attention.linear_qkv", "input_layernorm", "weight"),
        MegatronPart("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), cut=1),
        MegatronPart(
            "self_attention.linear_qkv.weight",
            ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
            MegatronForm.query_groups,
            cut=0,
        ),
        *norm_parts("mlp.linear_fc1", "post_attention_layernorm", "weight"),
        MegatronPart(
            "mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), MegatronForm.gated, cut=0
        ),
        MegatronPart("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), cut=1),
    ),
    last=(MegatronPart("decoder.final_layernorm.weight", ("model.norm.weight",)),),
)
SPEC = FamilySpec(
    network=("models.llama3", "Llama3"),
    blocks="model.layers",
    embedding="model.embed_tokens.weight",
    first=_first,
    block=_block,
    last=_last,
    initial=_initial,
    plan=_PLAN,
    hf=_HF,
    is_rotary=True,
    lora_targets=("q_proj", "v_proj"),
    unused={
        "dropout": "llama3 does not have it; set it to 0",
        "activation": "llama3 always uses SwiGLU; omit the key",
        "head_dim": "llama3 does not have it; omit the key",
    },
    megatron=MEGATRON,
)
