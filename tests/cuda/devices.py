"""The devices of a test whose CPU side is slow, and the one of a test for a CUDA device alone."""

from __future__ import annotations

import pytest

CPU = pytest.param("cpu", marks=(pytest.mark.slow,))
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
