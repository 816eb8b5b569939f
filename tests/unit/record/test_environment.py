"""The environment that a record names is the one in which this process computes."""

from __future__ import annotations

import pytest
import torch

from reprise.storage import Json
from tests.harness import TINY, compose
from trainer.record.environment import environment_record

CONFIG = compose(["model=gpt2_tiny", *TINY])


def record() -> Json:
    return environment_record(CONFIG, torch.device("cpu"), 3)


def test_it_names_the_processor_and_the_libraries() -> None:
    found = record()
    assert (found["device"], found["threads"], found["torch"]) == ("cpu", 3, torch.__version__)
    assert found["processor"].keys() == {"name", "instructions", "caches"}
    assert found["math"]["kernels"] == torch.backends.cpu.get_cpu_capability()
    libraries = torch.__config__.show()
    assert torch.backends.mkl.is_available() == (found["math"]["mkl"] != "none")
    assert found["math"]["mkl"] == "none" or found["math"]["mkl"] in libraries
    assert found["math"]["onednn"] in libraries


@pytest.mark.parametrize(
    ("variable", "member"),
    [
        ("MKL_CBWR", "settings"),
        ("MKL_ENABLE_INSTRUCTIONS", "settings"),
        ("ONEDNN_MAX_CPU_ISA", "settings"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "float32_products"),
    ],
)
def test_a_variable_that_chooses_kernels_is_in_it(monkeypatch: pytest.MonkeyPatch, variable: str, member: str) -> None:
    before = record()["math"]
    monkeypatch.setenv(variable, "X")
    after = record()["math"]
    assert f"{variable}=X" in after[member]
    assert {name for name in after if after[name] != before[name]} == {member}


def test_a_mode_of_torch_is_in_it() -> None:
    assert record()["math"]["float32_products"] == "highest"
    torch._C._set_mkldnn_enabled(False)
    try:
        assert record()["math"]["onednn"] == "off"
    finally:
        torch._C._set_mkldnn_enabled(True)
    torch.set_float32_matmul_precision("medium")
    try:
        assert record()["math"]["float32_products"] == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
