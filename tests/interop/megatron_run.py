"""What Megatron-Core itself does on a CPU: trains a model on given windows, saves half way, and notes every loss.

The model is a `GPTModel`, or a `HybridModel` where the arguments name a `hybrid_layer_pattern`.

A command of its own, on each rank: `python megatron_run.py FOLDER...`, where every folder has `job.json` and
`windows.npy` [iterations, samples, tokens]. It needs megatron-core, copied by `megatron_core.patched`, and nothing of
ours. A folder gets `SHARDING/iter_.../` for every way to save, and `losses.json`. With `"load": PATH` it loads a folder
before it trains, and saves what it has loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F


def pretend_cuda() -> None:
    """Answer what megatron-core asks of CUDA without asking whether it is there."""
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=1, major=8, minor=0)
    torch.cuda.get_rng_state = torch.get_rng_state
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_, **__: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_stream = lambda *_, **__: None


def pretend_triton() -> None:
    """Stand in for megatron-core's one module of Triton that every import needs: its kernels are for experts."""
    kernels = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
    sys.modules[kernels.__name__] = kernels


def gpt_model(args: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the class of a `GPTModel`, and its layers without TransformerEngine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = get_gpt_layer_local_spec(normalization=args["normalization"], qk_layernorm=args["qk_layernorm"])
    return GPTModel, {"transformer_layer_spec": spec}


def hybrid_model(args: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the class of a `HybridModel`, and its sub-blocks: the halves of a `GPTModel`'s layer."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer

    hybrid_block.TENorm = WrappedTorchNorm  # the only norm that no spec names
    layer = gpt_model(args)[1]["transformer_layer_spec"].submodules
    attention = replace(layer, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    mlp = replace(layer, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp)
    blocks = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )
    spec = ModuleSpec(module=hybrid_block.HybridStack, submodules=blocks)
    return HybridModel, {"hybrid_stack_spec": spec, "hybrid_layer_pattern": args["hybrid_layer_pattern"]}


class Trainer:
    """A model, its optimizer and one job."""

    def __init__(self, job: dict[str, Any]) -> None:
        from megatron.core import parallel_state as mpu
        from megatron.core import tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.job, self.args = job, job["args"]
        mpu.initialize_model_parallel(job["tp"], job["pp"])
        tensor_parallel.model_parallel_cuda_manual_seed(job["seed"])
        torch.manual_seed(job["seed"])
        args, is_gpt2 = self.args, not self.args["swiglu"]
        self.config = TransformerConfig(
            num_layers=args["num_layers"],
            hidden_size=args["hidden_size"],
            num_attention_heads=args["num_attention_heads"],
            num_query_groups=args["num_query_groups"],
            ffn_hidden_size=args["ffn_hidden_size"],
            kv_channels=args["kv_channels"],
            qk_layernorm=args["qk_layernorm"],
            use_cpu_initialization=True,
            tensor_model_parallel_size=job["tp"],
            pipeline_model_parallel_size=job["pp"],
            pipeline_dtype=torch.float32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=torch.float32,
            add_bias_linear=is_gpt2,
            gated_linear_unit=not is_gpt2,
            activation_func=partial(F.gelu, approximate="tanh") if is_gpt2 else F.silu,
            normalization=args["normalization"],
            layernorm_epsilon=args["norm_epsilon"],
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
        )
        build, spec = hybrid_model(args) if args.get("hybrid_layer_pattern") else gpt_model(args)
        self.raw = build(
            config=self.config,
            **spec,
            vocab_size=args["padded_vocab_size"],
            max_sequence_length=args["max_position_embeddings"],
            pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(),
            parallel_output=True,
            position_embedding_type=args["position_embedding_type"],
            rotary_base=args["rotary_base"],
            share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        )
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=job["distributed"], grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        self.ddp = DistributedDataParallel(self.config, ddp_config, self.raw)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=job["lr"],
                min_lr=0.0,
                weight_decay=job["weight_decay"],
                adam_beta1=job["betas"][0],
                adam_beta2=job["betas"][1],
                adam_eps=job["eps"],
                use_distributed_optimizer=job["distributed"],
                clip_grad=1.0,
            ),
            [self.ddp],
        )
        self.losses: list[float] = []

    def forward(self, batch: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        length = batch.shape[1]
        positions = torch.arange(length)[None].expand(len(batch), -1)
        mask = torch.ones(length, length).triu(1).bool()[None, None]
        return self.ddp(batch, positions, mask, labels=labels)

    def step(self, windows: torch.Tensor, *, micro_batches: int = 2) -> None:
        """Train on a global batch, and note its loss on every rank of the last stage."""
        from megatron.core import parallel_state as mpu
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        mine = windows.chunk(ranks)[rank].chunk(micro_batches)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = self.job["lr"]
            group["weight_decay"] = self.job["weight_decay"] * group["wd_mult"]  # as Megatron's scheduler sets it

        def forward_step(batches: Any, model: Any) -> Any:
            del model
            batch = next(batches)
            output = self.forward(batch[:, :-1], batch[:, 1:])
            return output, lambda per_token: (per_token.float().mean(), {"loss": per_token.float().mean().detach()})

        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(mine),
            model=[self.ddp],
            num_microbatches=micro_batches,
            seq_length=mine[0].shape[1] - 1,
            micro_batch_size=len(mine[0]),
            forward_only=False,
        )
        self.optimizer.step()
        if mpu.is_pipeline_last_stage():
            loss = torch.stack([one["loss"] for one in found]).mean()
            dist.all_reduce(loss, group=mpu.get_data_parallel_group())
            self.losses.append(loss.item() / ranks)

    def metadata(self, sharding: str) -> dict[str, Any]:
        found: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        return found if sharding == "plain" else {**found, "distrib_optim_sharding_type": sharding}

    def save(self, folder: Path, sharding: str) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core import parallel_state as mpu

        metadata = self.metadata(sharding)
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        path, iteration = folder / sharding / f"iter_{self.job['saved']:07d}", self.job["saved"]
        state: dict[str, Any] = {
            "args": argparse.Namespace(**self.args),
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "model": self.raw.sharded_state_dict(metadata={**metadata, "dp_cp_group": group}),
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state["model"], metadata={**metadata, "dp_cp_group": group}
        )
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
            (folder / sharding / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        dist.barrier()
        dist_checkpointing.save(state, str(path), content_metadata=metadata)

    def save_torch(self, folder: Path) -> None:
        """Save as Megatron-LM's `--ckpt-format torch` does: the dictionaries are Megatron-Core's own."""
        from megatron.core import parallel_state as mpu

        name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}" if self.job["pp"] > 1 else ""
        path = folder / f"torch/iter_{self.job['saved']:07d}" / name
        path.mkdir(parents=True, exist_ok=True)
        if self.job["distributed"]:
            self.optimizer.save_parameter_state(str(path / "distrib_optim.pt"))
        if mpu.get_data_parallel_rank() == 0:
            parallel = {"tensor_model_parallel_size": self.job["tp"], "pipeline_model_parallel_size": self.job["pp"]}
            state = {
                "args": argparse.Namespace(**{**self.args, **parallel}),
                "checkpoint_version": 3.0,
                "iteration": self.job["saved"],
                "model": self.raw.state_dict_for_save_checkpoint(),
                "optimizer": self.optimizer.state_dict(),
                "rng_state": [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}],
            }
            torch.save(state, path / "model_optim_rng.pt")
        (folder / "torch/latest_checkpointed_iteration.txt").write_text(str(self.job["saved"]))
        dist.barrier()

    def load(self, path: str) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core import parallel_state as mpu

        metadata = dist_checkpointing.load_content_metadata(path)
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        metadata = {**metadata, "dp_cp_group": group}
        state: dict[str, Any] = {"model": self.raw.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self.optimizer.sharded_state_dict(state["model"], is_loading=True, metadata=metadata)
        if pattern := self.args.get("hybrid_layer_pattern"):  # as Megatron-LM loads the folder of a GPTModel
            from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop

            for part in state.values():
                interop.retarget_sharded_state_dict_to_gpt_checkpoint(part, interop.gpt_compatible_layer_maps(pattern))
        found = dist_checkpointing.load(state, path)
        self.raw.load_state_dict(found["model"])
        optimizer = self.optimizer.chained_optimizers[0]
        fill = optimizer._set_main_param_and_optimizer_states
        # megatron-core expects Adam of TransformerEngine or Apex. torch's own has a step for each parameter too, which
        # megatron-core neither loads nor keeps apart.
        step = torch.tensor(found["optimizer"]["optimizer"]["param_groups"][0]["step"])
        optimizer._set_main_param_and_optimizer_states = lambda one, state: fill(one, {**state, "step": step})
        self.optimizer.load_state_dict(found["optimizer"])
        for state in optimizer.optimizer.state.values():
            state["step"] = step.clone()


def save_all(trainer: Trainer, folder: Path) -> None:
    """Save in every form that the job names."""
    for sharding in trainer.job["shardings"]:
        if sharding == "torch":
            trainer.save_torch(folder)
        else:
            trainer.save(folder, sharding)


def work(folder: Path) -> None:
    """Do one job."""
    from megatron.core import parallel_state as mpu

    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    windows = torch.from_numpy(np.load(folder / "windows.npy"))
    trainer = Trainer(job)
    if job["load"]:
        trainer.step(windows[0])  # torch's Adam has no state to load into before its first step
        trainer.losses.clear()
        trainer.load(job["load"])
        save_all(trainer, folder)
    for number, batch in enumerate(windows):
        if number == job["saved"] and not job["load"]:
            save_all(trainer, folder)
        trainer.step(batch)
    if mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(trainer.losses))
    dist.barrier()
    mpu.destroy_model_parallel()


def main() -> None:
    """Do the jobs of the command line, one after the other."""
    pretend_cuda()
    pretend_triton()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    for argument in sys.argv[1:]:
        work(Path(argument))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # the writer of megatron-core spawns processes that import this file again
    main()
