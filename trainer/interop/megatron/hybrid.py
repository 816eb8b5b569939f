"""Reads a `HybridModel` with alternating attention and MLP blocks as the equivalent `GPTModel`. Pure.

Megatron-LM recommends `HybridModel` for new runs. Its decoder is a pattern of sub-blocks: `*` is attention, `-` an MLP,
and other letters are Mamba, experts and more. `*-*-` computes the same as a `GPTModel` with two layers. The tensors
have the same names with two differences: they are numbered by sub-block, and the last norm is `final_norm`. Sources:
`megatron/core/models/hybrid` and `dist_checkpointing/gpt_checkpoint_interop.py` in Megatron-LM at commit `d98e8a6`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from trainer.interop.megatron.names import Correspondence
from trainer.interop.megatron.shards import Pieces

_BLOCK = re.compile(r"decoder\.layers\.(\d+)\.")
_NORM, _GPT_NORM, _PAIR = "decoder.final_norm.", "decoder.final_layernorm.", "*-"


def is_hybrid(names: Iterable[str]) -> bool:
    """Return whether the tensors are a `HybridModel`'s."""
    return any(name.startswith(_NORM) for name in names)


def as_gpt(args: Mapping[str, Any], layers: int | None) -> tuple[Mapping[str, Any], list[str]]:
    """Return the equivalent `GPTModel`'s arguments, and problems if there is no equivalent.

    Args:
        layers: A `HybridModel`'s pairs of sub-blocks. None for a `GPTModel`.
    """
    argument = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    if layers is None and not argument:
        return args, []
    expected = _PAIR * (layers or 0)
    problem = (
        f"HybridModel with the pattern {str(argument)!r}: only alternating attention and MLP is supported, as in '*-*-'"
    )
    problems = [] if str(argument or expected).replace("|", "") == expected else [problem]
    # A HybridModel has no rotary scaling, whatever the argument says.
    changes = {"is_hybrid_model": None, "hybrid_override_pattern": None, "use_rope_scaling": False}
    return {**args, **changes, "num_layers": layers}, problems


def as_hybrid(correspondence: Correspondence) -> Correspondence:
    """Return a `GPTModel`'s tensor under its name in the equivalent `HybridModel`."""
    tensor = correspondence.tensor
    if tensor.layer is None:
        return replace(correspondence, tensor=replace(tensor, name=tensor.name.replace(_GPT_NORM, _NORM)))
    block = len(_PAIR) * tensor.layer + tensor.name.startswith("mlp.")
    return replace(correspondence, tensor=replace(tensor, layer=block))


def layers_of(pieces: Pieces) -> int:
    """Count a `HybridModel`'s pairs of sub-blocks."""
    return len({match[1] for name in pieces if (match := _BLOCK.match(name))}) // len(_PAIR)
