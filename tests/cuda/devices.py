"""The devices of a test: a CPU, a CUDA device, and the simulated one in a process that `tests.simulated` started."""

from __future__ import annotations

import pytest
import torch

SIMULATED = "simulated"
IS_SIMULATED = torch._C._get_privateuse1_backend_name() == SIMULATED

CPU = pytest.param("cpu", marks=(pytest.mark.slow,))  # for a test whose CPU side is slow
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
OURS = [pytest.param(SIMULATED, marks=pytest.mark.simulated)] if IS_SIMULATED else []
NOT_SIMULATED = ["cpu", CUDA]
ALL, ALL_SLOW = ["cpu", *OURS, CUDA], [CPU, *OURS, CUDA]
