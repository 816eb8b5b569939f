"""Qwen3 as data, under transformers' names and orientation. The network is in `llama3`.

Sources: Yang et al. 2025, "Qwen3 Technical Report"; transformers' `Qwen3ForCausalLM`.
"""

from dataclasses import replace

from models import llama3_spec
from models.config import ModelConfig, StoredTensor
from models.hf_config import HfConfig, HfConstant, HfField
from models.megatron_names import MegatronPart
from models.spec import Cut, TensorParallelPlan

_LIKE = llama3_spec.SPEC


def _block(config: ModelConfig) -> dict[str, StoredTensor]:
    norm = StoredTensor.plain(config.head_width)
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in _LIKE.block(config).items():
        tensors[name] = tensor
        if name == "self_attn.o_proj.weight":
            tensors |= {"self_attn.q_norm.weight": norm, "self_attn.k_norm.weight": norm}
    return tensors


_PLAN = TensorParallelPlan(
    ends=_LIKE.plan.ends,
    block={**_LIKE.plan.block, "self_attn.q_norm": Cut.head_norm, "self_attn.k_norm": Cut.head_norm},
)
_HF = HfConfig(
    "Qwen3ForCausalLM",
    "qwen3",
    (
        *llama3_spec.hf_members(
            HfField("n_kv_head", "num_key_value_heads", 32),
            HfField("head_dim", "head_dim", 128),
            inner_width=22016,
            vocab_size=151936,
            positions=32768,
            unused="use_sliding_window",
        ),
        HfConstant("layer_types", lambda values: (["full_attention"] * values["n_layer"], None), is_written=False),
    ),
    tokens={"bos_token_id": None, "eos_token_id": None},
    neutral={"attention_dropout": 0.0},
)
_HEAD_NORMS = (
    MegatronPart("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    MegatronPart("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
_MEGATRON = replace(
    llama3_spec.MEGATRON,
    arguments={**llama3_spec.MEGATRON.arguments, "qk_layernorm": (True,)},
    block=tuple(
        part
        for shared in llama3_spec.MEGATRON.block
        for part in (shared, *(_HEAD_NORMS if shared.name == "self_attention.linear_qkv.weight" else ()))
    ),
)
SPEC = replace(
    _LIKE,
    block=_block,
    plan=_PLAN,
    hf=_HF,
    unused={
        "dropout": "qwen3 does not have it; set it to 0",
        "activation": "qwen3 always uses SwiGLU; omit the key",
        "rope_scaling": "qwen3 does not have this form; set it to null",
    },
    needs=("head_dim",),
    megatron=_MEGATRON,
)
