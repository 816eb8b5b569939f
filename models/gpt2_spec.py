"""GPT-2 as data, under transformers' names and orientation. The network is in `gpt2`.

Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; transformers' `GPT2LMHeadModel`.
"""

from math import sqrt

from models.config import Activation, Initial, InitialKind, ModelConfig, StoredTensor
from models.hf_config import HfConfig, HfConstant, HfField
from models.megatron_names import ABSENT, POSITIONS, MegatronForm, MegatronNames, MegatronPart, norm_parts
from models.spec import Cut, FamilySpec, TensorParallelPlan

_plain = StoredTensor.plain


def _first(config: ModelConfig) -> dict[str, StoredTensor]:
    return {
        "transformer.wte.weight": _plain(config.vocab_size, config.n_embd),
        "transformer.wpe.weight": _plain(config.max_position_embeddings, config.n_embd),
    }


def _block(config: ModelConfig) -> dict[str, StoredTensor]:
    width, inner = config.n_embd, config.intermediate_size
    return {
        "ln_1.weight": _plain(width),
        "ln_1.bias": _plain(width),
        "attn.c_attn.weight": StoredTensor(shape=(width, 3 * width), view=(width, 3, width)),
        "attn.c_attn.bias": StoredTensor(shape=(3 * width,), view=(3, width)),
        "attn.c_proj.weight": _plain(width, width),
        "attn.c_proj.bias": _plain(width),
        "ln_2.weight": _plain(width),
        "ln_2.bias": _plain(width),
        "mlp.c_fc.weight": _plain(width, inner),
        "mlp.c_fc.bias": _plain(inner),
        "mlp.c_proj.weight": _plain(inner, width),
        "mlp.c_proj.bias": _plain(width),
    }


def _last(config: ModelConfig) -> dict[str, StoredTensor]:
    return {"transformer.ln_f.weight": _plain(config.n_embd), "transformer.ln_f.bias": _plain(config.n_embd)}


def _initial(name: str, config: ModelConfig) -> Initial:
    """Return initial values as transformers' `GPT2PreTrainedModel._init_weights` sets them.

    Projections into the residual stream get std / sqrt(2 * n_layer), for as many additions to it: section 2.3 in the
    GPT-2 paper.
    """
    if name.endswith(".bias"):
        return Initial(InitialKind.zeros)
    if name.split(".")[-2].startswith("ln_"):
        return Initial(InitialKind.ones)
    if name.endswith("c_proj.weight"):
        return Initial(InitialKind.normal, config.initializer_range / sqrt(2 * config.n_layer))
    return Initial(InitialKind.normal, config.initializer_range)


_PLAN = TensorParallelPlan(
    ends={
        # Positions are added to whole embeddings, so these are cut along the sequence behind their dropout.
        "transformer.wte": Cut.whole_embedding,
        "dropout": Cut.scatter,
        "transformer.ln_f": Cut.sequence_norm,
        "lm_head": Cut.output,
    },
    block={
        "attn": Cut.gather,
        "attn.c_attn": Cut.columns,
        "attn.c_proj": Cut.rows,
        "mlp": Cut.gather,
        "mlp.c_fc": Cut.columns,
        "mlp.c_proj": Cut.rows,
        "ln_1": Cut.sequence_norm,
        "ln_2": Cut.sequence_norm,
    },
)
# transformers' names, see its `activations.py`.
_ACTIVATIONS = {
    "gelu_new": Activation.gelu_tanh,
    "gelu_pytorch_tanh": Activation.gelu_tanh,
    "gelu": Activation.gelu,
}
_HF = HfConfig(
    "GPT2LMHeadModel",
    "gpt2",
    (
        HfField("activation", "activation_function", Activation.gelu_tanh, names=_ACTIVATIONS),
        HfField("n_layer", "n_layer", 12),
        HfField("n_head", "n_head", 12),
        HfField("n_embd", "n_embd", 768),
        HfField("intermediate_size", "n_inner", lambda values: 4 * values["n_embd"]),
        HfField("max_position_embeddings", "n_positions", 1024),
        HfField("max_position_embeddings", "n_ctx", is_read=False),  # llama.cpp's converter reads no other name
        HfField("vocab_size", "vocab_size", 50257),
        HfField("dropout", "attn_pdrop", is_read=False),
        HfField("dropout", "embd_pdrop", is_read=False),
        HfField("dropout", "resid_pdrop", 0.1),
        HfField("norm_eps", "layer_norm_epsilon", 1e-5),
        HfField("initializer_range", "initializer_range", 0.02),
        HfField("tie_word_embeddings", "tie_word_embeddings", True),
        HfConstant("scale_attn_weights", (True,), is_written=False),
        HfConstant("scale_attn_by_inverse_layer_idx", (False,), is_written=False),
        HfConstant("add_cross_attention", (False,), is_written=False),
    ),
    tokens={"bos_token_id": 50256, "eos_token_id": 50256},
    neutral={"reorder_and_upcast_attn": False},
)
_MEGATRON = MegatronNames(
    arguments={
        POSITIONS: ("learned_absolute", None),
        "normalization": ("LayerNorm",),
        "swiglu": (False,),
        "add_bias_linear": (True,),
        "qk_layernorm": ABSENT,
        "use_rope_scaling": ABSENT,
    },
    first=(
        MegatronPart("embedding.word_embeddings.weight", ("transformer.wte.weight",), MegatronForm.vocabulary, cut=0),
        MegatronPart("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    ),
    block=(
        *norm_parts("self_attention.linear_qkv", "ln_1", "weight", "bias"),
        MegatronPart("self_attention.linear_proj.weight", ("attn.c_proj.weight",), MegatronForm.transposed, cut=1),
        MegatronPart("self_attention.linear_proj.bias", ("attn.c_proj.bias",)),
        MegatronPart(
            "self_attention.linear_qkv.weight", ("attn.c_attn.weight",), MegatronForm.fused_query_groups, cut=0
        ),
        MegatronPart("self_attention.linear_qkv.bias", ("attn.c_attn.bias",), MegatronForm.fused_query_groups, cut=0),
        *norm_parts("mlp.linear_fc1", "ln_2", "weight", "bias"),
        MegatronPart("mlp.linear_fc1.weight", ("mlp.c_fc.weight",), MegatronForm.transposed, cut=0),
        MegatronPart("mlp.linear_fc1.bias", ("mlp.c_fc.bias",), cut=0),
        MegatronPart("mlp.linear_fc2.weight", ("mlp.c_proj.weight",), MegatronForm.transposed, cut=1),
        MegatronPart("mlp.linear_fc2.bias", ("mlp.c_proj.bias",)),
    ),
    last=(
        MegatronPart("decoder.final_layernorm.weight", ("transformer.ln_f.weight",)),
        MegatronPart("decoder.final_layernorm.bias", ("transformer.ln_f.bias",)),
    ),
    tokenizer_type="GPT2BPETokenizer",
)
SPEC = FamilySpec(
    network=("models.gpt2", "GPT2"),
    blocks="transformer.h",
    embedding="transformer.wte.weight",
    first=_first,
    block=_block,
    last=_last,
    initial=_initial,
    plan=_PLAN,
    hf=_HF,
    is_rotary=False,
    lora_targets=("c_attn",),
    unused={
        "rope_scaling": "gpt2 has learned positions; set it to null",
        "head_dim": "gpt2 does not have it; omit the key",
    },
    follows={"n_kv_head": "n_head"},
    fan_in_fan_out=True,
    megatron=_MEGATRON,
)
