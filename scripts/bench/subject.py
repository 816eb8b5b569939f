"""The training state that is saved, loaded and stepped: built as the trainer builds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
import xxhash

from models.adapters import model_documents
from reprise.format import STATE, TensorKind
from reprise.storage import Json
from reprise.tensors import Contents, LiveTensor
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.launch.process_group import Cluster
from trainer.parallel.context import ParallelContext
from trainer.parallel.mesh import build_mesh
from trainer.run.build import build_state
from trainer.run.parallelize import build_context, build_models
from trainer.run.state import TrainerState
from trainer.schedules.progress import Progress
from trainer.training.step import train_step


def config_of(model: str, *overrides: str, samples: int = 4, seq_length: int = 64) -> Config:
    """Return a configuration of a model's preset, with the samples of an iteration in one micro batch."""
    train = (
        f"train.global_batch_size={samples}",
        f"train.micro_batch_size={samples}",
        f"train.seq_length={seq_length}",
    )
    return compose([f"model={model}", *train, *overrides])


def tokens_of(config: Config) -> int:
    """Return the tokens of an iteration."""
    return config.train.global_batch_size * config.train.seq_length


def windows_of(config: Config, device: torch.device) -> torch.Tensor:
    """Return an iteration's random tokens, int64 [samples, seq_length + 1], the same ones on every side."""
    generator, shape = torch.Generator().manual_seed(1234), (config.train.micro_batch_size, config.train.seq_length + 1)
    return torch.randint(config.model.vocab_size, shape, generator=generator).to(device)


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A training state on one rank."""

    config: Config
    cluster: Cluster
    state: TrainerState
    context: ParallelContext

    def tensors(self) -> Iterator[LiveTensor]:
        """Yield this rank's part of every tensor that is saved."""
        yield from self.state.shards()

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
        windows = windows_of(self.config, self.cluster.device)

        def iterate() -> float:
            return train_step(
                self.state,
                [windows],
                keys=[1],
                share=1,
                lr=1e-4,
                clip_grad=1.0,
                context=self.context,
                cluster=self.cluster,
            ).loss

        return iterate

    def contents(self, iteration: int) -> Contents:
        """Return the contents that the trainer saves after `iteration`."""
        progress = Progress(iteration, iteration, tokens_of(self.config) * iteration)
        documents: dict[str, Json] = {
            **model_documents(self.config.model),
            STATE: progress.state_record(1e-3, {}),
        }
        return replace(self.state.contents(with_optimizer=True), documents=documents)

    @property
    def own_bytes(self) -> int:
        """Return the bytes of this rank's tensors."""
        return sum(tensor.local.nbytes for tensor in self.tensors())

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all tensors of a checkpoint."""
        return sum(spec.total_bytes for spec in self.contents(0).specs)

    def fill(self) -> None:
        """Fill every tensor with noise, equal on ranks that hold the same box; moments are positive."""
        for number, tensor in enumerate(self.tensors()):
            least = -0.02 if tensor.spec.kind is TensorKind.MODEL else 0.0
            torch.manual_seed(number)
            tensor.local.detach().uniform_(least, 0.02)

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


def build_subject(config: Config, cluster: Cluster) -> Subject:
    """Build a state as `trainer.run.build` does, without data and folders. A call of all ranks."""
    topology = config.parallel.topology(cluster.world_size)
    mesh = build_mesh(topology, cluster.device.type)
    stages = build_models(config, cluster, topology=topology, mesh=mesh)
    state = build_state(config, stages, topology, topology.coordinate(cluster.rank).pp)
    context = build_context(config, state, topology=topology, mesh=mesh, cluster=cluster)
    subject = Subject(config, cluster, state, context)
    subject.fill()
    return subject
