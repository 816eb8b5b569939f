"""The project's imports from torch's private modules, which no other module here imports.

torch moves these names between releases. Each is imported at its first use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from reprise.lazy import importer

if TYPE_CHECKING:
    from torch._C import _distributed_c10d as _distributed_c10d
    from torch._utils import _flatten_dense_tensors as _flatten_dense_tensors
    from torch._utils import _unflatten_dense_tensors as _unflatten_dense_tensors
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard as _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

NAMES = {
    "torch._C": "_distributed_c10d",
    "torch._utils": "_flatten_dense_tensors _unflatten_dense_tensors",
    "torch.distributed._functional_collectives": "AsyncCollectiveTensor",
    "torch.distributed.fsdp._fully_shard._fsdp_api": "ReduceScatter",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta",
    "torch.distributed.tensor._shards_wrapper": "LocalShardsWrapper",
    "torch.distributed.tensor.placement_types": "_StridedShard",
    "torch.testing._internal.distributed.fake_pg": "FakeStore",
}


def is_a(value: object, name: str) -> bool:
    """Return whether a value is an instance of a private class, without importing its module."""
    module = next(sys.modules.get(module) for module, names in NAMES.items() if name in names.split())
    return module is not None and isinstance(value, getattr(module, name))


if not TYPE_CHECKING:
    __getattr__ = importer(__name__, NAMES, root="")
