"""GPT-2 and LLaMA-3, their sizes and their form on disk; single-device code that imports torch only.

Parallelism, initial values and training are applied from outside. torch is imported when the first name that needs it
is asked for: whoever reads or checks a configuration does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from models.config import (
    Activation,
    Family,
    Initial,
    InitialKind,
    ModelConfig,
    RopeScaling,
    Stage,
    StoredTensor,
    parameter_count,
    problems,
)

if TYPE_CHECKING:
    from models.families import (
        Model,
        aliases,
        build_model,
        flops_per_token,
        generation_config,
        hf_config,
        initial_values,
        stored_tensors,
    )
    from models.gpt2 import GPT2
    from models.layers import token_loss
    from models.llama3 import Llama3

__all__ = [
    "GPT2",
    "Activation",
    "Family",
    "Initial",
    "InitialKind",
    "Llama3",
    "Model",
    "ModelConfig",
    "RopeScaling",
    "Stage",
    "StoredTensor",
    "aliases",
    "build_model",
    "flops_per_token",
    "generation_config",
    "hf_config",
    "initial_values",
    "parameter_count",
    "problems",
    "stored_tensors",
    "token_loss",
]

_HOME_OF = {"GPT2": "models.gpt2", "Llama3": "models.llama3", "token_loss": "models.layers"}

if not TYPE_CHECKING:  # a type checker sees the names themselves, and refuses others

    def __getattr__(name: str) -> object:
        """Import what is asked for and is not here yet. Source: PEP 562."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(_HOME_OF.get(name, "models.families")), name)
        globals()[name] = found
        return found
