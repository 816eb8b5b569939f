"""Maps a rank's tensors in Megatron-LM's `torch` format to the names in Megatron-Core's `GPTModel`.

A rank's model is a flat dictionary (Megatron-Core) or nested ones (Megatron-LM's own models, also under older names).
Sources: `state_dict_for_save_checkpoint` in `megatron/model/{gpt_model,language_model}.py`, Megatron-LM 2.0 to
core_r0.12, and `fix_query_key_value_ordering` in `megatron/training/checkpointing.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from reprise.errors import MismatchError
from reprise.storage import shown
from trainer.interop.stored import FileTensor
from trainer.interop.torch_file import is_plain

_QUERY_KEY_VALUE = ".self_attention.linear_qkv."
# Each rewrites part of a name.
_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^module\.", ""),
        (r"^language_model\.(?=embedding\.|output_layer\.)", ""),
        (r"^language_model\.(encoder|transformer)\.final_(layer)?norm\.", "decoder.final_layernorm."),
        (r"^language_model\.(encoder|transformer)\.", "decoder."),
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"\.(self_)?attention\.query_key_value\.", _QUERY_KEY_VALUE),
        (r"\.(self_)?attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
        (r"\.input_(layer)?norm\.", ".self_attention.linear_qkv.layer_norm_"),
        (r"\.(post_attention_(layer)?norm|pre_mlp_layernorm)\.", ".mlp.linear_fc1.layer_norm_"),
    )
)
_NOT_PARAMETERS = re.compile(r"(_extra_state|rotary_pos_emb\.inv_freq)$")


def _core_name(name: str) -> str:
    """Return a parameter's name in Megatron-Core, with fused norms."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def stage_of(model: Mapping[Any, Any]) -> dict[str, FileTensor]:
    """Return the parameters in a rank's part of the model, in the rank's order, by Megatron-Core's names.

    Raises:
        ValueError: An entry is not a dense floating-point tensor, or two entries name the same parameter.
    """
    pieces = dict[str, FileTensor]()
    for name, tensor in _flat(model, ""):
        if _NOT_PARAMETERS.search(name):
            continue
        if not is_plain(tensor):
            raise ValueError(f"{name} is not a dense floating-point tensor: {shown(tensor)}")
        core = _core_name(name)
        if core in pieces:
            raise ValueError(f"two entries name the same parameter: {core}")
        pieces[core] = FileTensor.of(tensor.detach())
    return pieces


def _flat(table: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def require_known_version(version: object, *, where: object) -> None:
    """Refuse files from before 2021, whose fused projections are not ordered by query group.

    Raises:
        MismatchError: The version is not supported.
    """
    if version not in (2, 3):
        raise MismatchError(
            "A Megatron checkpoint has an unsupported version",
            where=where,
            expected="checkpoint_version 2 or 3",
            found=shown(version),
            fix="Load it in a 2023 Megatron-LM, and save it again.",
        )
