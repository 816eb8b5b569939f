"""The devices of a test whose CPU side is too dear for the gate, or proved elsewhere on a CPU."""

from __future__ import annotations

import pytest

CPU_IN_SOAK = pytest.param("cpu", marks=(pytest.mark.slow, pytest.mark.soak))
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
