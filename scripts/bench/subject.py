"""The training state that is saved, loaded and stepped: built as the trainer builds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import xxhash

from models import families
from models.config import Family, ModelConfig
from reprise.folder import STATE
from reprise.json_file import Json
from reprise.layout import TensorKind
from reprise.live_tensors import Contents, LiveTensor
from trainer.config.checkpoint import CheckpointSection
from trainer.config.derived import topology_of
from trainer.config.parallel import ParallelSection
from trainer.config.schema import Config
from trainer.config.train import Dtype, TrainSection
from trainer.launch.process_group import Cluster
from trainer.parallel.context import ParallelContext
from trainer.parallel.mesh import build_mesh
from trainer.run.parallelize import build_context, build_grid, build_models
from trainer.run.state import TrainerState, build_part
from trainer.schedules.progress import Progress
from trainer.training.step import train_step

PARALLEL: Mapping[str, ParallelSection] = {
    "zero0": ParallelSection(zero_stage=0),
    "zero3": ParallelSection(zero_stage=3),
    "tp2": ParallelSection(zero_stage=0, tensor_model_parallel_size=2),
}


def gpt2(layers: int, heads: int, width: int, vocab_size: int, *, positions: int = 1024, pad: int = 1) -> ModelConfig:
    """Return a GPT-2 whose last token begins and ends texts, as the original's does."""
    return ModelConfig(
        family=Family.gpt2,
        n_layer=layers,
        n_head=heads,
        n_kv_head=heads,
        n_embd=width,
        intermediate_size=4 * width,
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        bos_token_id=vocab_size - 1,
        eos_token_id=vocab_size - 1,
        dropout=0.0,
        pad_vocab_multiple=pad,
    )


# The parameters take 12 bytes each with their two moments: 1.5 GB, 50 MB and a little.
SIZES: Mapping[str, ModelConfig] = {
    "gpt2_124m": gpt2(12, 12, 768, 50257, pad=128),
    "gpt2_4m": gpt2(4, 4, 256, 4096, positions=256),
    "small": gpt2(2, 2, 64, 512, positions=64),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of an iteration, in one micro batch; `compiles` applies to every side that trains on them."""

    samples: int = 4
    seq_length: int = 64
    dtype: Dtype = Dtype.float32
    compiles: bool = False

    @property
    def tokens(self) -> int:
        return self.samples * self.seq_length

    def windows(self, model: ModelConfig, device: torch.device) -> torch.Tensor:
        """Return random tokens, int64 [samples, seq_length + 1], the same ones on every side."""
        generator = torch.Generator().manual_seed(1234)
        return torch.randint(model.vocab_size, (self.samples, self.seq_length + 1), generator=generator).to(device)


@dataclass(frozen=True, slots=True)
class Subject:
    """A training state on one rank, and the batch of its iterations."""

    config: Config
    batch: Batch
    cluster: Cluster
    state: TrainerState
    context: ParallelContext

    def tensors(self) -> Iterator[LiveTensor]:
        """Yield this rank's part of every tensor that is saved."""
        yield from (tensor for tensor in self.state.shards() if not tensor.is_copy)

    def named(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors by name, the live ones."""
        return {tensor.spec.name: tensor.local.detach() for tensor in self.tensors()}

    @contextmanager
    def hooked(self, call: Callable[[], object]) -> Iterator[None]:
        """Run `call` at each step of the optimizers, before it changes a tensor."""
        with ExitStack() as stack:
            for part in self.state.parts:
                stack.callback(part.optimizer.register_step_pre_hook(lambda *_: (call(), None)[1]).remove)
            yield

    def step(self) -> None:
        """Step the optimizers without gradients: no value changes, but step hooks run."""
        for part in self.state.parts:
            part.optimizer.zero_grad(set_to_none=True)
            part.optimizer.step()

    def iteration(self) -> Callable[[], float]:
        """Return the trainer's iteration on a random batch; it returns the loss."""
        windows = self.batch.windows(self.config.model, self.cluster.device)

        def iterate() -> float:
            context, cluster = self.context, self.cluster
            return train_step(
                self.state, [windows], keys=[1], lr=1e-4, clip_grad=1.0, context=context, cluster=cluster
            ).loss

        return iterate

    def contents(self, iteration: int) -> Contents:
        """Return the contents that the trainer saves after `iteration`."""
        progress = Progress(iteration, self.batch.samples * iteration, self.batch.tokens * iteration)
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

    def fill(self) -> None:
        """Fill every tensor with noise, equal on ranks that hold the same box."""
        generator = torch.Generator()
        for number, tensor in enumerate(self.tensors()):
            generator.manual_seed(number)
            tensor.local.detach().uniform_(-1, 1, generator=generator)

    def initialize(self) -> None:
        """Set initial values for training, since noise in the moments would lead to NaN."""
        for tensor in self.tensors():
            if tensor.spec.kind is TensorKind.MODEL:
                tensor.local.detach().normal_(0.0, 0.02)
            else:
                tensor.local.detach().zero_()

    def spoil(self) -> None:
        """Set every tensor to zero before a load."""
        for tensor in self.tensors():
            tensor.local.detach().zero_()

    def digest(self) -> int:
        """Return a digest of all tensors of this rank."""
        hasher = xxhash.xxh3_64()
        for tensor in self.tensors():
            hasher.update(tensor.local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return hasher.intdigest()


def build_subject(
    model: ModelConfig, cluster: Cluster, batch: Batch | None = None, *, parallel: str = "zero0"
) -> Subject:
    """Build a state as `trainer.run.build` does, without data and folders. A call of all ranks."""
    batch = batch or Batch()
    train = TrainSection(
        global_batch_size=batch.samples,
        micro_batch_size=batch.samples,
        seq_length=batch.seq_length,
        dtype=batch.dtype,
        compile=batch.compiles,
    )
    config = Config(model, train=train, parallel=PARALLEL[parallel], checkpoint=CheckpointSection())
    topology = topology_of(config, cluster.world_size)
    mesh = build_mesh(topology, cluster.device.type) if cluster.world_size > 1 else None
    stages = build_models(config, cluster.device, topology=topology, mesh=mesh)
    grid = build_grid(topology, mesh)
    file_bytes = config.checkpoint.file_bytes
    parts = [build_part(model, stage, config.optimizer, grid=grid, file_bytes=file_bytes) for stage in stages]
    state = TrainerState(model, parts, grid)
    context = build_context(config, state, topology=topology, mesh=mesh, cluster=cluster)
    subject = Subject(config, batch, cluster, state, context)
    subject.initialize()
    return subject
