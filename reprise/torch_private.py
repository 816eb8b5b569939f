"""What the project uses of torch's private names. torch moves them between releases.

Other modules import private names from here, each at its first use. Private members of torch's public classes are
listed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reprise.lazy import importer

if TYPE_CHECKING:
    from torch._utils import _flatten_dense_tensors as _flatten_dense_tensors
    from torch._utils import _unflatten_dense_tensors as _unflatten_dense_tensors
    from torch.distributed.distributed_c10d import _get_default_store as _get_default_store
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard as _StridedShard
    from torch.optim._muon import _zeropower_via_newtonschulz as _zeropower_via_newtonschulz
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

NAMES = {
    "torch._utils": "_flatten_dense_tensors _unflatten_dense_tensors",
    "torch.distributed.distributed_c10d": "_get_default_store",
    "torch.distributed.fsdp._fully_shard._fsdp_api": "ReduceScatter",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta",
    "torch.distributed.tensor.placement_types": "_StridedShard",
    "torch.optim._muon": "_zeropower_via_newtonschulz",
    "torch.testing._internal.distributed.fake_pg": "FakeStore",
}

MEMBERS = {
    "torch": "_chunk_cat _foreach_add_ _foreach_copy_ _foreach_div_ _foreach_mul_ _foreach_norm _fused_adamw_",
    "torch.UntypedStorage": "_cdata",
    "torch.distributed.tensor.DTensor": "_local_tensor",
    "torch.nn.Module": (
        "_apply _backward_hooks _backward_pre_hooks _forward_hooks _forward_pre_hooks _non_persistent_buffers_set "
        "_parameters _save_to_state_dict _state_dict_hooks _state_dict_pre_hooks"
    ),
    "torch.optim.Optimizer": "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
}


if not TYPE_CHECKING:
    __getattr__ = importer(__name__, NAMES, root="")
