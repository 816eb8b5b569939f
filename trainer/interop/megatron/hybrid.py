"""Reads a `HybridModel` with alternating attention and MLP blocks as the equivalent `GPTModel`. Pure.

Megatron-LM recommends `HybridModel` for new runs. Its decoder is a pattern of sub-blocks: `*` is attention, `-` an MLP,
and other letters are Mamba, experts and more. `*-*-` computes the same as a `GPTModel` with two layers. The tensors
have the same names with two differences: they are numbered by sub-block, and the last norm is `final_norm`. Sources:
`megatron/core/models/hybrid` and `dist_checkpointing/gpt_checkpoint_interop.py` in Megatron-LM at commit `d98e8a6`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.interop.megatron.shards import Pieces

_BLOCK = re.compile(r"(?<=^decoder\.layers\.)(\d+)(?=\.(mlp|pre_mlp)?)")
_NORM, _PAIR = "decoder.final_norm.", "*-"


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


def in_layers(pieces: Pieces) -> Pieces:
    """Return tensors under a `GPTModel`'s names, also if they have an equivalent `HybridModel`'s."""
    if not is_hybrid(pieces):
        return pieces
    layers = {name: _BLOCK.sub(_layer_of, name) for name in pieces}
    return {layers[name].replace(_NORM, "decoder.final_layernorm."): parts for name, parts in pieces.items()}


def _layer_of(block: re.Match[str]) -> str:
    """Return a block's layer. A block out of the pattern keeps its number, which then fits no model."""
    number = int(block[1])
    return str(number // len(_PAIR)) if number % len(_PAIR) == bool(block[2]) else block[1]
