"""A file of a checkpoint, or a token file, gets other content and is read through the public API.

All digests are recomputed, as an attacker would do, so that the input reaches the parser.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from reprise import load, save
from reprise.errors import TrainerError
from reprise.format import MANIFEST, STATE, manifest
from reprise.format.manifest import FileEntry, Manifest, digest_of
from reprise.storage import Json, json_file
from trainer.config.checkpoint import FLAGS
from trainer.config.optimizer import OptimizerSection
from trainer.data.fingerprint import fingerprint, scan
from trainer.data.token_file import open_token_file, write_token_file
from trainer.record import resume_rules, run_record
from trainer.record.resume_rules import differences, settle

MODEL = "model.safetensors"
OPTIMIZER = "optimizer/optimizer-00001-of-00001.safetensors"
_TAIL_BYTES = len(',"xxh3_64":"0123456789abcdef"}\n')
_STATE: Json = {
    "iteration": 4,
    "consumed_samples": 8,
    "consumed_tokens": 128,
    "best_loss": 2.5,
    "valid_loss": None,
    "owes_evaluation": False,
    "batch": {"seq_length": 16, "global_batch_size": 2, "micro_batch_size": 1},
    "schedule": {
        "style": "cosine", "lr": 0.1, "min_lr": 0.0, "warmup_iters": 1, "decay_iters": 9, "wsd_decay_iters": 1
    },
    "adam": {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    "optimizer": {"name": "AdamW", "groups": []},
}  # fmt: skip


def seal(body: bytes) -> bytes:
    """Return a manifest whose JSON text is `body`, which lacks its last brace, with a matching digest."""
    return body + f',"xxh3_64":"{digest_of(body)}"}}\n'.encode()


class Inputs:
    """A small checkpoint and a token file in `folder`, of which one file at a time gets other content."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self._net, self._optimizer = self.fresh()
        self._net(torch.randn(2, 4)).sum().backward()
        self._optimizer.step()
        checkpoint = save(folder / "kept", self._net, self._optimizer, iteration=4, state={"note": [1, "two", None]})
        self._kept = {
            path.relative_to(checkpoint): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()
        }
        self.checkpoint, self.tokens = folder / "tried" / "iter_0000004", folder / "tokens.bin"
        write_token_file(self.tokens, [np.arange(40)], dtype=np.uint16)
        self._token_bytes = self.tokens.read_bytes()
        self.restore()
        self._manifest = manifest.from_bytes(self._kept[Path(MANIFEST)], where=MANIFEST)
        self.seeds: Mapping[str, bytes] = {
            "manifest": self._kept[Path(MANIFEST)][:-_TAIL_BYTES],
            "state": self._kept[Path(STATE)],
            "trainer_state": json_file.to_bytes({"format": "reprise/1", **_STATE}),
            "header": self._header(MODEL),
            "optimizer_header": self._header(OPTIMIZER),
            "tokens": self._token_bytes,
        }
        self._tries: Mapping[str, Callable[[bytes], None]] = {
            "manifest": self._try_manifest,
            "state": lambda data: self._try_document(STATE, data),
            "trainer_state": self._try_trainer_state,
            "header": lambda data: self._try_header(MODEL, data),
            "optimizer_header": lambda data: self._try_header(OPTIMIZER, data),
            "tokens": self._try_tokens,
        }

    def attempt(self, target: str, data: bytes) -> bool:
        """Read `data` as the named file; return whether it was accepted.

        Any exception other than a `TrainerError` is a finding, and propagates.
        """
        try:
            self._tries[target](data)
        except TrainerError as error:
            str(error).encode()  # it is logged, and travels between ranks
            return False
        finally:
            for name in (MANIFEST, _FILES.get(target, MANIFEST)):
                self.write(name, self._kept[Path(name)])
        return True

    def restore(self) -> None:
        """Restore the valid checkpoint and tokens, and delete all other files."""
        self.tokens.write_bytes(self._token_bytes)
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        for name, data in self._kept.items():
            self.write(str(name), data)

    def write(self, name: str, data: bytes) -> None:
        """Give a file of the checkpoint other content without changing the manifest."""
        path = self.checkpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def load(self) -> None:
        """Load the checkpoint into a fresh model and optimizer."""
        load(self.checkpoint, *self.fresh())

    def seal_file(self, name: str, entry: FileEntry) -> None:
        """Set the manifest's entry of a file to `entry`."""
        files = {**self._manifest.files, name: entry}
        self.write(MANIFEST, manifest.to_bytes(replace(self._manifest, files=files)))

    @property
    def good_manifest(self) -> Manifest:
        """Return the manifest of the valid checkpoint."""
        return self._manifest

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a model and an optimizer that match the checkpoint."""
        net = nn.Linear(4, 3)
        return net, torch.optim.AdamW(net.parameters(), lr=0.01)

    def _header(self, name: str) -> bytes:
        data = self._kept[Path(name)]
        return data[8 : 8 + int.from_bytes(data[:8], "little")].rstrip(b" ")

    def _try_manifest(self, data: bytes) -> None:
        self.write(MANIFEST, seal(data))
        self.load()

    def _try_document(self, name: str, data: bytes) -> None:
        self.write(name, data)
        self.seal_file(name, FileEntry(len(data), digest_of(data), is_tensor_file=False))
        self.load()

    def _try_header(self, name: str, data: bytes) -> None:
        original = self._kept[Path(name)]
        tensors = original[8 + int.from_bytes(original[:8], "little") :]
        head = len(data).to_bytes(8, "little") + data
        self.write(name, head + tensors)
        self.seal_file(name, FileEntry(len(head) + len(tensors), digest_of(head), is_tensor_file=True))
        self.load()

    def _try_trainer_state(self, data: bytes) -> None:
        state = json_file.parse(data, where=STATE)
        settle(differences(state, _STATE, resume_rules.RULES), allowed=FLAGS, where=STATE)
        run_record.saved_progress(state, seq_length=32, where=STATE)
        run_record.saved_schedule(state, OptimizerSection(), where=STATE)[0].at(5, 40)

    def _try_tokens(self, data: bytes) -> None:
        self.tokens.write_bytes(data)
        fingerprint([scan(open_token_file(self.tokens))])


_FILES = {"state": STATE, "header": MODEL, "optimizer_header": OPTIMIZER}


class Opened:
    """The paths that this process opens while it is `watching`, outside a folder. Hooks stay for good: make one."""

    def __init__(self, folder: Path) -> None:
        self._root = f"{folder}{os.sep}"
        self.watching = False
        self.outside: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.watching and event == "open" and isinstance(arguments[0], str | bytes | Path):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not f"{path}{os.sep}".startswith(self._root):
                self.outside.append(path)
