"""The state that is saved and loaded: built as the trainer builds it, filled with noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from models import families
from models.config import ModelConfig
from reprise.folder import STATE
from reprise.json_file import Json
from reprise.live_tensors import Contents, LiveTensor
from scripts.bench.gpt2 import gpt2_config
from trainer.config.checkpoint import CheckpointSection
from trainer.config.derived import topology_of
from trainer.config.parallel import ParallelSection
from trainer.config.schema import Config
from trainer.config.train import TrainSection
from trainer.launch.process_group import Cluster
from trainer.parallel.context import ParallelContext
from trainer.parallel.mesh import build_mesh
from trainer.run.parallelize import build_context, build_grid, build_models
from trainer.run.state import TrainerState, build_part
from trainer.schedules.progress import Progress

SAMPLES, SEQ_LENGTH = 4, 64


# The parameters take 12 bytes each with their two moments: 1.5 GB, 50 MB and a little.
SIZES: Mapping[str, ModelConfig] = {
    "gpt2_124m": gpt2_config(12, 12, 768, 50257, pad_vocab_multiple=128),
    "gpt2_4m": gpt2_config(4, 4, 256, 4096, positions=256),
    "small": gpt2_config(2, 2, 64, 512, positions=64),
}

PARALLEL: Mapping[str, ParallelSection] = {
    "one rank": ParallelSection(zero_stage=0),
    "zero0": ParallelSection(zero_stage=0),
    "zero3": ParallelSection(zero_stage=3),
    "tp2": ParallelSection(zero_stage=0, tensor_model_parallel_size=2),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A training state on one rank, with the inputs of an iteration."""

    config: Config
    cluster: Cluster
    state: TrainerState
    context: ParallelContext

    def tensors(self) -> Iterator[LiveTensor]:
        """Yield this rank's part of every tensor that is saved."""
        yield from (tensor for tensor in self.state.shards() if not tensor.is_copy)

    def flat(self) -> list[npt.NDArray[np.uint8]]:
        """Return the memory of every tensor of this rank, each as flat bytes. One rank: all are contiguous."""
        return [t.local.detach().reshape(-1).view(torch.uint8).numpy() for t in self.tensors()]

    def named(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors by name, the live ones."""
        return {tensor.spec.name: tensor.local.detach() for tensor in self.tensors()}

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the optimizers of this rank's stages."""
        return [part.optimizer for part in self.state.parts]

    def step(self) -> None:
        """Step the optimizers without gradients: no value changes, but step hooks run."""
        for optimizer in self.optimizers():
            optimizer.zero_grad(set_to_none=True)
            optimizer.step()

    def contents(self, iteration: int) -> Contents:
        """Return the contents that the trainer saves after `iteration`."""
        progress = Progress(iteration, SAMPLES * iteration, SAMPLES * SEQ_LENGTH * iteration)
        documents: dict[str, Json] = {
            "config.json": families.hf_config(self.config.model),
            "generation_config.json": families.generation_config(self.config.model),
            STATE: progress.state_record(1e-3, {}),
        }
        return self.state.contents(documents, with_optimizer=True)

    @property
    def own_bytes(self) -> int:
        """Return the bytes of this rank's tensors."""
        return sum(tensor.local.nbytes for tensor in self.tensors())

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all tensors of a checkpoint."""
        return sum(spec.total_bytes for spec in self.contents(0).specs)

    def fill(self, seed: int) -> None:
        """Fill every tensor with noise, equal on ranks that hold the same box."""
        generator = torch.Generator()
        for number, tensor in enumerate(self.tensors()):
            generator.manual_seed(seed << 20 | number)
            tensor.local.detach().uniform_(-1, 1, generator=generator)

    def spoil(self) -> None:
        """Set every tensor to zero before a load."""
        for tensor in self.tensors():
            tensor.local.detach().zero_()

    def digest(self) -> int:
        """Return a digest of all tensors of this rank."""
        hasher = xxhash.xxh3_64()
        for tensor in self.tensors():
            hasher.update(tensor.local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return hasher.intdigest()


def build_subject(model: ModelConfig, parallel: ParallelSection, cluster: Cluster) -> Subject:
    """Build a state as `trainer.run.build` does, without data and folders. A call of all ranks."""
    train = TrainSection(global_batch_size=SAMPLES, micro_batch_size=SAMPLES, seq_length=SEQ_LENGTH)
    config = Config(model, train=train, parallel=parallel, checkpoint=CheckpointSection())
    topology = topology_of(config, cluster.world_size)
    mesh = build_mesh(topology, cluster.device.type) if cluster.world_size > 1 else None
    stages = build_models(config, cluster.device, topology=topology, mesh=mesh)
    grid = build_grid(topology, mesh)
    file_bytes = config.checkpoint.file_bytes
    parts = [build_part(model, stage, config.optimizer, grid=grid, file_bytes=file_bytes) for stage in stages]
    state = TrainerState(model, parts, grid)
    subject = Subject(
        config, cluster, state, build_context(config, state, topology=topology, mesh=mesh, cluster=cluster)
    )
    subject.fill(0)
    return subject
