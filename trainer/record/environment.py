"""What a run's bits depend on besides its configuration: software, processor and their settings."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence

import torch

from reprise.errors import first_of
from reprise.storage import Json
from trainer.config.saved import flattened
from trainer.config.schema import Config
from trainer.launch.device import device_name
from trainer.launch.process_group import Cluster

_log = logging.getLogger(__name__)

# Variables that select other kernels in libraries; torch's own is in `kernels`.
KERNEL_VARIABLES = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_CPU_ISA_HINTS",
    "DNNL_CPU_ISA_HINTS",
    "OMP_DYNAMIC",
    "OMP_THREAD_LIMIT",
    "CUBLAS_WORKSPACE_CONFIG",
)
# Variables that lower the precision inside float32 products.
PRECISION_VARIABLES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "NVIDIA_TF32_OVERRIDE")


def environment_record(config: Config, device: torch.device, threads: int) -> Json:
    """Return this process's software and hardware on which bits depend, besides the configuration."""
    return {
        "device": device_name(device),
        "threads": threads,
        "torch": str(torch.__version__),
        "optimizer_implementation": "fused",
        "compile": config.train.compile,
        "deterministic": config.train.deterministic,
        "activation_checkpointing": config.train.activation_checkpointing,
        **kernel_record(),
    }


def kernel_record() -> Json:
    """Return this host's processor, and torch's kernels and libraries for it."""
    return {"processor": _processor(), "math": _math(os.environ)}


def _processor() -> Json:
    """Return the processor as torch sees it. Unknown with an older torch."""
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    caches = [
        f"{name.removesuffix('_cache_size')} {size}" for name, size in capabilities.items() if name.endswith("_size")
    ]
    return {
        "name": str(capabilities.get("cpu_name", "unknown")),
        "instructions": " ".join(sorted(name for name, value in capabilities.items() if value is True)),
        "caches": ", ".join(sorted(caches)),
    }


def _math(variables: Mapping[str, str]) -> Json:
    """Return the kernels and libraries for sums and products, and the settings that select them."""
    libraries = torch.__config__.show()
    return {
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "mkl": _version(r"Math Kernel Library Version (\S+)", libraries),
        "onednn": _version(r"MKL-DNN (\S+)", libraries) if torch.backends.mkldnn.enabled else "off",
        "settings": _settings(KERNEL_VARIABLES, variables),
        "float32_products": " ".join(
            filter(None, [torch.get_float32_matmul_precision(), _settings(PRECISION_VARIABLES, variables)])
        ),
    }


def _version(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return "none" if match is None else match[1]


def _settings(names: Sequence[str], variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={variables[name]}" for name in names if variables.get(name))


def joint_environment(environment: Json, cluster: Cluster) -> Json:
    """Return all ranks' environment: a list with a value per rank wherever they differ. Collective.

    Rank 0 logs the differences.
    """
    joined: Json = cluster.channel.join("environment", environment, _joined)
    differing = {name: values for name, values in flattened(joined).items() if isinstance(values, list)}
    if differing and cluster.rank == 0:
        for name, values in differing.items():
            ranks = [rank for rank, value in enumerate(values) if value != values[0]]
            _log.warning(f"environment.{name}: {values[0]} on rank 0, {values[ranks[0]]} on rank {first_of(ranks, 1)}")
        _log.warning(
            "the ranks compute in different environments: a resume has the same bits if every rank runs in its old "
            "environment again, and parallel.invariant_ranks does not hold"
        )
    return joined


def _joined(rows: Sequence[Json]) -> Json:
    joined: dict[str, object] = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(value, Mapping):
            joined[name] = _joined(values)
        else:
            joined[name] = value if all(member == value for member in values) else values
    return joined
