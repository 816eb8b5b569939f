"""A writer made from docs/checkpoint_format.md alone: what it writes is a checkpoint, and the trainer goes on from it.

The writer imports nothing of the project. It is given the tensors, and what the run was told by its command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from safetensors.numpy import load_file

from reprise.errors import TrainerError
from tests.harness import TINY, all_files, curve, run_ok, tensor_files
from tests.resume.starts import start
from trainer.commands import checkpoint as look
from trainer.data.token_file import write_token_file

pytestmark = pytest.mark.slow

Tensors = Mapping[str, npt.NDArray[np.float32]]
PAGE, BLOCK, WIDTH, LAYERS = 4096, 4194304, 20, 2


def digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def model_order() -> list[str]:
    """Return the names of GPT-2's weights."""
    block = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    stems = [f"h.{layer}.{name}" for layer in range(LAYERS) for name in block] + ["ln_f"]
    names = ["wte.weight", "wpe.weight", *(f"{stem}.{leaf}" for stem in stems for leaf in ("weight", "bias"))]
    return [f"transformer.{name}" for name in names]


def view(name: str, shape: tuple[int, ...]) -> list[int]:
    is_fused = name.endswith(("attn.c_attn.weight", "attn.c_attn.bias")) and not name.startswith("step.")
    return [*shape[:-1], 3, shape[-1] // 3] if is_fused else list(shape)


def fingerprint(token_file: Path) -> str:
    tokens = token_file.read_bytes()[1024:]
    return digest(f"{len(tokens)} uint16 {digest(tokens)}\n".encode())


def state(tokens: Path) -> dict[str, object]:
    """Return the state after two iterations, as the document lists its members."""
    names = model_order()
    flat = [name for name in names if name.endswith(".bias") or ".ln_" in name]
    sizes = {"n_layer": LAYERS, "n_head": 2, "n_kv_head": 2, "n_embd": WIDTH, "intermediate_size": 44}
    sizes |= {"vocab_size": 257, "max_position_embeddings": 32, "bos_token_id": 256, "eos_token_id": 256}
    numbers = {"dropout": 0.0, "norm_eps": 1e-5, "initializer_range": 0.02, "rope_theta": 500000.0}
    more = {"tie_word_embeddings": True, "rope_scaling": None, "pad_vocab_multiple": 1}
    schedule = {"lr": 0.001, "min_lr": 0.0001, "warmup_iters": 3, "decay_iters": 20, "wsd_decay_iters": 0}
    matrices = {"weight_decay": 0.1, "names": [name for name in names if name not in flat]}
    return {
        "format": "reprise/1",
        "iteration": 2,
        "consumed_samples": 24,
        "consumed_tokens": 24 * 16,
        "best_loss": None,
        "model": {"family": "gpt2", **sizes, **numbers, **more},
        "topology": {"world_size": 1, "tp": 1, "pp": 1, "vpp": 1, "sp": False, "dp": 1, "zero_stage": 1},
        "batch": {"global_batch_size": 12, "seq_length": 16, "micro_batch_size": 2},
        "data": {"fingerprint": fingerprint(tokens)},
        "seed": 1234,
        "schedule": {"style": "cosine", **schedule},
        "adam": {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
        "optimizer": {"name": "AdamW", "groups": [matrices, {"weight_decay": 0.0, "names": flat}]},
        "precision": {"dtype": "float32"},
    }


def tensor_file(tensors: Tensors) -> tuple[bytes, bytes]:
    """Return the header of a file and its data."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, value in tensors.items():
        table[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length), b"".join(value.tobytes() for value in tensors.values())


def write(folder: Path, given: Tensors, document: Mapping[str, object]) -> None:
    """Write a checkpoint, whose name makes it one, in one piece for each tensor."""
    weights = model_order()
    kept = [f"{key}{name}" for key in ("exp_avg.", "exp_avg_sq.", "step.") for name in weights]
    families = {"model.safetensors": weights, "optimizer/optimizer-00001-of-00001.safetensors": kept}
    partial = folder.with_name(f".{folder.name}.mine-1.partial")
    (partial / "optimizer").mkdir(parents=True)
    files, entries = dict[str, object](), dict[str, object]()
    for file, names in families.items():
        header, data = tensor_file({name: given[name] for name in names})
        (partial / file).write_bytes(header + data)
        files[file] = {"bytes": len(header) + len(data), "header_xxh3_64": digest(header)}
        for name in names:
            value, shape = given[name].tobytes(), view(name, given[name].shape)
            blocks = "".join(digest(value[lo : lo + BLOCK]) for lo in range(0, len(value), BLOCK))
            entries[name] = {"view": shape, "cuts": [[0, size] for size in shape], "digests": blocks}
    total = sum(given[name].nbytes for name in weights)
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(weights), "model.safetensors")}
    for name, table in {"model.safetensors.index.json": index, "trainer_state.json": document}.items():
        data = json.dumps(table).encode()
        (partial / name).write_bytes(data)
        files[name] = {"bytes": len(data), "xxh3_64": digest(data)}
    manifest = {"format": "reprise-manifest/1", "attempt": "mine-1", "block_bytes": BLOCK, "files": files}
    manifest |= {"aliases": {"lm_head.weight": "transformer.wte.weight"}, "tensors": entries}
    body = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False)[:-1].encode()
    (partial / "manifest.json").write_bytes(body + f',"xxh3_64":"{digest(body)}"}}\n'.encode())
    partial.rename(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a run of four iterations, saved every two, and the command that it was started with."""
    folder = tmp_path_factory.mktemp("writer")
    tokens = np.random.default_rng(3).integers(0, 257, 5000)
    write_token_file(folder / "tokens.bin", [tokens], dtype=np.uint16)
    command = ["model=gpt2_tiny", *TINY, "data=token_file", f"data.train={folder}/tokens.bin", "train.train_iters=4"]
    command += ["schedule.lr_decay_iters=20", "checkpoint.save_interval=2"]
    run_ok(folder / "run", command)
    return folder / "run", command


def mine(run: Path, folder: Path, change: Callable[[dict[str, object]], object] = lambda _: None) -> Path:
    """Write the second iteration of a run again, and return the checkpoint."""
    theirs = run / "checkpoints/iter_0000002"
    tensors = {name: value for path in theirs.rglob("*.safetensors") for name, value in load_file(path).items()}
    document = state(run.parent / "tokens.bin")
    change(document)
    (folder / "checkpoints").mkdir(parents=True)
    write(folder / "checkpoints/iter_0000002", tensors, document)
    return folder / "checkpoints/iter_0000002"


def test_the_trainer_goes_on_from_it_bit_for_bit(run: tuple[Path, list[str]], tmp_path: Path) -> None:
    theirs, command = run
    path = mine(theirs, tmp_path / "run")
    assert look.main(["verify", str(path)]) == 0
    assert tensor_files(path) == tensor_files(theirs / "checkpoints/iter_0000002")
    assert f"iteration 2 from {path}" in run_ok(tmp_path / "run", command).text
    assert curve(tmp_path / "run") == curve(theirs)[2:]
    last = [tensor_files(folder / "checkpoints/iter_0000004") for folder in (tmp_path / "run", theirs)]
    assert last[0] == last[1]


def test_ranks_that_hold_parts_of_it_go_on_too(run: tuple[Path, list[str]], tmp_path: Path) -> None:
    theirs, command = run
    mine(theirs, tmp_path / "run")
    layout = ["parallel=zero3", "checkpoint.reshard=true"]
    run_ok(tmp_path / "run", [*command, *layout], ranks=2)
    ours, expected = (float.fromhex(row[1]) for row in (curve(tmp_path / "run")[0], curve(theirs)[2]))
    assert abs(ours - expected) <= 1e-6 * expected  # the resume contract: float32 sums in another order


CHANGES: dict[str, tuple[Callable[[dict[str, object]], object], str | None]] = {
    "optional": (lambda table: [table.pop(name) for name in ("optimizer", "precision")], None),
    "optimizer": (lambda table: table.update(optimizer={"name": "SGD"}), "optimizer.name"),
    "seed": (lambda table: table.pop("seed"), "checkpoint.override_data=true"),
    "data": (lambda table: table.pop("data"), "checkpoint.override_data=true"),
    "topology": (lambda table: table.pop("topology"), "checkpoint.reshard=true"),
    "adam": (lambda table: table.pop("adam"), "checkpoint.override_scheduler=true"),
    "best_loss": (lambda table: table.pop("best_loss"), "best_loss"),
    "model": (lambda table: table.pop("model"), "model"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_members_may_be_missing_as_the_document_says(run: tuple[Path, list[str]], tmp_path: Path, case: str) -> None:
    theirs, command = run
    change, refusal = CHANGES[case]
    path = mine(theirs, tmp_path / "run", change)
    before = all_files(path)
    if refusal is None:
        assert start(tmp_path / "run", *command).state.progress.iteration == 2
    else:
        with pytest.raises(TrainerError, match=refusal):
            start(tmp_path / "run", *command)
    assert all_files(path) == before
