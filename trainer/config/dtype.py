"""The dtypes among which settings choose."""

from __future__ import annotations

from enum import Enum


class Dtype(Enum):
    """A dtype for activations, stored moments or weights-only saves. Parameters are float32 either way."""

    float32 = "float32"
    bfloat16 = "bfloat16"
