"""Reads a `HybridModel` of attention and MLP in turn as the equivalent `GPTModel`. Pure.

Megatron-LM advises `HybridModel` for new runs. Its decoder is a pattern of sub-blocks: `*` is attention, `-` an MLP,
and other letters are Mamba, experts and more. `*-*-` computes as a `GPTModel` of two layers. The tensors have the same
names with two differences: they are numbered by sub-block, and the last norm is `final_norm`. Sources:
`megatron/core/models/hybrid` and `dist_checkpointing/gpt_checkpoint_interop.py` of Megatron-LM at commit `d98e8a6`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.interop.megatron.names import Correspondence

_BLOCK = re.compile(r"(?:.+\.)?decoder\.layers\.(\d+)\.(.+)")
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
    """Return the sub-blocks of the tensors, in Megatron's letters; None for the tensors of a `GPTModel`."""
    blocks = dict[int, set[str]]()
    for name in names:
        if match := _BLOCK.fullmatch(name):
            letters_of_name = (letter for start, letter in _LETTERS.items() if match[2].startswith(start))
            blocks.setdefault(int(match[1]), set()).update(letters_of_name)
    if not blocks or any(len(letters) > 1 for letters in blocks.values()):
        return None
    return "".join("".join(letters) or _OTHER for _, letters in sorted(blocks.items()))


def as_gpt(args: Mapping[str, Any], pattern: str | None) -> tuple[Mapping[str, Any], list[str]]:
    """Return the arguments of the equivalent `GPTModel`, and problems if there is none.

    Args:
        pattern: the sub-blocks of a `HybridModel`; None if the model is a `GPTModel`.
    """
    argument = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    if pattern is None and not argument:
        return args, []
    layers = len(pattern or "") // len(_PAIR)
    patterns = (str(argument).replace("|", "") if argument else pattern, pattern)
    problem = (
        f"HybridModel with the pattern {str(argument or pattern)!r}: ours are attention and MLP in turn, as in '*-*-'"
    )
    problems = [] if layers and patterns == (_PAIR * layers,) * 2 else [problem]
    # A HybridModel has no rotary scaling, whatever the argument says.
    changes = {"is_hybrid_model": None, "hybrid_override_pattern": None, "use_rope_scaling": False}
    return {**args, **changes, "num_layers": layers}, problems


def in_sub_blocks(tensors: Sequence[Correspondence]) -> list[Correspondence]:
    """Return the tensors of a `GPTModel` with the numbers of a `HybridModel`'s sub-blocks in place of layers."""
    return [replace(tensor, tensor=replace(tensor.tensor, layer=_sub_block(tensor))) for tensor in tensors]


def _sub_block(correspondence: Correspondence) -> int | None:
    layer = correspondence.tensor.layer
    return None if layer is None else len(_PAIR) * layer + correspondence.tensor.name.startswith("mlp.")


def stored_name(name: str) -> str:
    """Return the name of a tensor in a folder of a `HybridModel`."""
    return name.replace("decoder.final_layernorm.", "decoder.final_norm.")
