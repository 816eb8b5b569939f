"""A run of a few iterations as the trainer makes one, on a model that a process trains in some hundredths of a second.

It starts, loads, rewinds, records, saves in the background and deletes as the trainer does, so that a thousand kills at
every place of it take minutes. The trainer itself is killed in tests of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from reprise import AsyncSaver, load_state_dict
from reprise.format import FORMAT, STATE, build_layout
from reprise.loading import LoadSource, Restorer
from reprise.local import LocalCheckpointer
from reprise.ranks import StoreChannel, single_rank_channel
from reprise.saving import Checkpointer, Retention, SavePolicy
from reprise.storage import CheckpointFolder, Document, Files
from reprise.tensors import Contents, Grid, live_tensors, zeros_like_files
from reprise.tensors.live import canonical_name, parameter_names
from tests.crash.hosts import Mount, enter_host
from tests.crash.killing import BEFORE, Killer
from trainer.metrics.run_log import IterationRecord, RunLog

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What a run does, and where one of its ranks dies.

    Args:
        copies: on how many other hosts a host's part lies as well; each rank is then a host with a disk of its own,
            and saves local checkpoints. None for one folder that all ranks share.
        weights: whether every iteration's weights are saved alone as well, in bfloat16.
        seed: of the samples; another one makes another branch of the run.
        rewind_to: the iteration to go back to; None goes on from the newest.
        saves_again: whether the iteration that it goes on from is saved again, in place of its checkpoint.
        with_library: save state dicts with `AsyncSaver`, as a program of one's own does.
        victim: the rank that dies at its call number `at`; None for none.
    """

    folder: str
    ranks: int = 1
    iterations: int = 4
    keep: int = 1
    copies: int | None = None
    weights: bool = False
    seed: int = 1
    rewind_to: int | None = None
    saves_again: bool = False
    with_library: bool = False
    victim: int | None = None
    at: int | None = None
    when: str = BEFORE

    @property
    def root(self) -> Path:
        return Path(self.folder)

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def local(self) -> Path:
        """Return the folder of local checkpoints, where every host has its own disk mounted."""
        return self.root / "local"

    def disk(self, rank: int) -> Path:
        """Return the disk of the host of a rank, as it is seen from outside."""
        return self.root / f"disk{rank}"

    def beside(self, name: str) -> Path:
        """Return a file beside the run's folder, which is not what is tried."""
        return self.root.with_name(f"{self.root.name}.{name}")

    def arguments(self) -> list[str]:
        """Return the plan as the arguments of `main`."""
        return [json.dumps(asdict(self))]


def main(arguments: list[str]) -> None:
    """Run one rank of a plan; its number is in the environment. Rank 0 leaves the names of its calls beside."""
    plan = Plan(**json.loads(arguments[0]))
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    is_victim = rank == plan.victim
    killer = Killer(plan.root, notes=plan.beside(f"notes{rank}"), at=plan.at if is_victim else None, when=plan.when)
    if plan.with_library:
        _train_with_library(plan, rank, killer)
        plan.beside(f"calls{rank}").write_text(" ".join(killer.calls))
        return
    if plan.copies is not None:
        _become_host(plan, rank)
    channel, store = _channel(rank, plan.ranks)
    killer.install()
    if plan.copies is not None:
        killer.install_for_messages()
    nonce = channel.broadcast("nonce", os.urandom(4).hex().encode()).decode()
    retention = Retention(plan.keep, kept=frozenset(() if plan.rewind_to is None else (plan.rewind_to,)))
    policy = SavePolicy(plan.checkpoints, retention, async_save=True, commit_timeout_s=TIMEOUT_S)
    if plan.copies is None:
        checkpointer = Checkpointer(policy, channel, nonce=nonce)
    else:
        policy = replace(policy, folder=plan.local)
        checkpointer = LocalCheckpointer(policy, channel, nonce=nonce, copies=plan.copies, local_ranks=[rank])
    keep_all = Retention(kept=frozenset({0}))
    weights = replace(policy, folder=plan.checkpoints / "weights", retention=keep_all, dtype=torch.bfloat16)
    alone = Checkpointer(weights, channel, nonce=f"{nonce}-weights") if plan.weights else None
    try:
        _train(plan, channel, checkpointer, alone, nonce)
    except BaseException:
        checkpointer.abandon()
        raise
    plan.beside(f"calls{rank}").write_text(" ".join(killer.calls))
    channel.agree("all are through", None)
    channel.await_others() if rank == 0 else channel.fail("")
    del store


def _train_with_library(plan: Plan, rank: int, killer: Killer) -> None:
    """Train as a program of one's own does, whose ranks are those of torch's process group."""
    if plan.ranks > 1:
        _, store = _channel(rank, plan.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks)
    killer.install()
    run, log = _Training(plan), _log_of(plan)
    with AsyncSaver(plan.checkpoints, max_checkpoint_keep=plan.keep, commit_timeout_s=TIMEOUT_S) as saver:
        if any(plan.checkpoints.glob("iter_*")):
            state = run.state_dict()
            load_state_dict(plan.checkpoints, state)
            run.iteration = state["iteration"]
        if rank == 0:
            plan.beside("resumed").write_text(str(run.iteration))
            log.open(run.iteration, "a: 1\n")
        while run.iteration < plan.iterations:
            loss = run.step()
            if rank == 0:
                log.iteration(run.record(loss))
                log.sync()
            saver.save_state_dict(run.iteration, run.state_dict())
    if rank == 0:
        log.close()
    if plan.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _log_of(plan: Plan) -> RunLog:
    return RunLog(plan.root, train_iters=plan.iterations, mfu_scale=None)


def _become_host(plan: Plan, rank: int) -> None:
    """Move this rank to a host of its own, with its disk under the path of local checkpoints."""
    enter_host(f"host{rank}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the name of the host leads nowhere
    for folder in (plan.local, plan.disk(rank)):
        folder.mkdir(parents=True, exist_ok=True)
    Mount(plan.local, plan.disk(rank)).make()


def _channel(rank: int, ranks: int) -> tuple[StoreChannel, TCPStore | None]:
    if ranks == 1:
        return single_rank_channel(), None
    port = int(os.environ["MASTER_PORT"])
    if rank:
        _await_host(port)
    store = TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    return StoreChannel(store, rank, world_size=ranks, timeout_s=TIMEOUT_S), store


def _await_host(port: int) -> None:
    """Wait until the store's host listens: a client that comes too early tries again after a second only."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        os.sched_yield()


def _train(
    plan: Plan,
    channel: StoreChannel,
    checkpointer: Checkpointer,
    alone: Checkpointer | None,
    nonce: str,
) -> None:
    run, log = _Training(plan), _log_of(plan)
    checkpointer.start()
    if alone is not None:
        alone.start()
    local = checkpointer if isinstance(checkpointer, LocalCheckpointer) else None
    committed = CheckpointFolder(plan.checkpoints, Files()).committed() if channel.rank == 0 else []
    if local is not None and channel.rank == 0:
        committed = local.folders.iterations
    if channel.broadcast("committed", str(len(committed)).encode()) != b"0":
        source = LoadSource(plan.checkpoints, plan.rewind_to, local=None if local is None else local.folders)
        restorer = Restorer(channel, nonce=nonce)
        restored = restorer.restore(source, check=lambda _: None, live=lambda _: run.contents().live)
        checkpointer.note_loaded(restored)
        checkpoint = restored.checkpoint
        run.iteration = checkpoint.iteration
        checkpointer.rewind(run.iteration)
        if plan.saves_again:
            checkpointer.mark_outdated(run.iteration)
            checkpointer.save(run.iteration, run.contents())
    if alone is not None:
        alone.rewind(run.iteration or -1)
        alone.find_saved(run.iteration or -1)
        alone.save(run.iteration, run.weights())
    if channel.rank == 0:
        plan.beside("resumed").write_text(str(run.iteration))
        log.open(run.iteration, "a: 1\n")
    while run.iteration < plan.iterations:
        loss = run.step()
        if channel.rank == 0:
            log.iteration(run.record(loss))
            log.sync()
        if local is not None and run.iteration == plan.iterations:
            local.await_copies()
        checkpointer.save(run.iteration, run.contents())
        if alone is not None:
            alone.save(run.iteration, run.weights())
        for report in [*checkpointer.reports(), *([] if alone is None else alone.reports())]:
            if report.error is not None:
                raise report.error
    checkpointer.wait()
    if checkpointer.results.last_error is not None:
        raise checkpointer.results.last_error
    if alone is not None:
        alone.close()
    checkpointer.close()
    if channel.rank == 0:
        log.close()


class _Training:
    """A model whose state after an iteration depends on every sample so far."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(0)
        self._plan = plan
        self._net = nn.Sequential(nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 7))
        self.optimizer = torch.optim.AdamW(self._net.parameters(), lr=0.01, fused=True)
        for parameter in self._net.parameters():
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        self.iteration = 0
        self._place_like_files()

    def step(self) -> float:
        """Train an iteration and return its loss."""
        self.iteration += 1
        generator = torch.Generator().manual_seed(1000 * self._plan.seed + self.iteration)
        loss = self._net(torch.randn(4, 60, generator=generator)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def contents(self) -> Contents:
        """Return what is saved; every rank is a replica."""
        live = tuple(live_tensors(self._net, self.optimizer, grid=Grid.flat(self._plan.ranks)))
        document = {"format": FORMAT, "iteration": self.iteration, "user": {}, "groups": []}
        specs = tuple(tensor.spec for tensor in live)
        documents: dict[str, Document] = {STATE: document}
        if self._plan.copies is not None:  # the folder of a host has it under another name until it is whole
            documents["config.json"] = {"model_type": "small"}
        return Contents(specs, live, aliases_of(self._net), documents, (self.optimizer,))

    def state_dict(self) -> dict[str, Any]:
        """Return the same as a nested state dict, with a copy of the weights that no optimizer changes."""
        return {
            "model": get_model_state_dict(self._net),
            "optimizer": get_optimizer_state_dict(self._net, self.optimizer),
            "mirror": {name: value.clone() for name, value in self._net.state_dict().items()},
            "iteration": self.iteration,
        }

    def weights(self) -> Contents:
        """Return the weights alone."""
        live = tuple(live_tensors(self._net, None, grid=Grid.flat(self._plan.ranks)))
        return replace(self.contents(), specs=tuple(tensor.spec for tensor in live), live=live)

    def _place_like_files(self) -> None:
        contents, named = self.contents(), dict(self._net.named_parameters())
        live = [(tensor, tensor.local) for tensor in contents.live if tensor.spec.name in named]
        for stored, memory in zeros_like_files(live, ("exp_avg", "exp_avg_sq"), build_layout(contents.specs)).items():
            key, _, name = stored.partition(".")
            self.optimizer.state[named[name]][key] = memory

    def record(self, loss: float) -> IterationRecord:
        """Return what is recorded of the iteration; all figures follow from the seed."""
        return IterationRecord(
            iteration=self.iteration,
            loss=loss,
            grad_norm=0.0,
            lr=0.01,
            consumed_samples=4 * self.iteration,
            tokens=1,
            seconds=float(self._plan.seed),
            checkpoint_seconds=0.0,
        )


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the second names of tied parameters, alias -> stored name."""
    names = parameter_names(model)
    return {
        canonical_name(name): names[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if canonical_name(name) != names[parameter]
    }
