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

_BLOCK = re.compile(r"(?<=^decoder\.layers\.)(\d+)\.(.+)")
_LETTERS = {
    "self_attention.linear_qkv.": "*",
    "mlp.linear_fc1.": "-",
    "mixer.": "M",
    "mlp.router.": "E",
    "mlp.experts.": "E",
}
_OTHER = "?"
_PAIR = "*-"


def pattern_of(names: Iterable[str]) -> str | None:
    """Return the tensors' sub-blocks in Megatron's letters, or None for a `GPTModel`."""
    blocks = dict[int, set[str]]()
    for name in names:
        if match := _BLOCK.search(name):
            letters_of_name = (letter for start, letter in _LETTERS.items() if match[2].startswith(start))
            blocks.setdefault(int(match[1]), set()).update(letters_of_name)
    if not blocks or any(len(letters) > 1 for letters in blocks.values()):
        return None
    return "".join("".join(letters) or _OTHER for _, letters in sorted(blocks.items()))


def as_gpt(args: Mapping[str, Any], pattern: str | None) -> tuple[Mapping[str, Any], list[str]]:
    """Return the equivalent `GPTModel`'s arguments, and problems if there is no equivalent.

    Args:
        pattern: A `HybridModel`'s sub-blocks. None for a `GPTModel`.
    """
    argument = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    if pattern is None and not argument:
        return args, []
    layers = len(pattern or "") // len(_PAIR)
    patterns = (str(argument).replace("|", "") if argument else pattern, pattern)
    problem = (
        f"HybridModel with the pattern {str(argument or pattern)!r}: only alternating attention and MLP is supported, "
        "as in '*-*-'"
    )
    problems = [] if layers and patterns == (_PAIR * layers,) * 2 else [problem]
    # A HybridModel has no rotary scaling, whatever the argument says.
    changes = {"is_hybrid_model": None, "hybrid_override_pattern": None, "use_rope_scaling": False}
    return {**args, **changes, "num_layers": layers}, problems


def in_layers(pieces: Pieces) -> Pieces:
    """Return tensors under a `GPTModel`'s names, also if they have an equivalent `HybridModel`'s."""
    return pieces if pattern_of(pieces) is None else {_layer_name(name): parts for name, parts in pieces.items()}


def _layer_name(name: str) -> str:
    name = name.replace("decoder.final_norm.", "decoder.final_layernorm.")
    return _BLOCK.sub(lambda match: f"{int(match[1]) // len(_PAIR)}.{match[2]}", name)
