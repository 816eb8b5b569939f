"""What every format keeps: what another program saved comes in bit for bit, or is refused in one message.

The files are those that other programs would have written of states of random numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from reprise.errors import TrainerError
from tests.interop import megatron_layout, states, torch_dist_layout
from tests.interop.megatron_layout import Way
from tests.interop.states import ALONE, ENDS, assert_carried, cases, opened, overrides_of, read_all, state_of
from tests.interop.torch_dist_layout import Form
from tests.messages import refused
from trainer.commands import convert
from trainer.interop.source import StateSource

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

BF16 = torch.bfloat16
Writer = Callable[[Path, StateSource], Path]


@dataclass(frozen=True)
class Layout:
    """A form of a format: the family of its model, and its writer.

    Args:
        is_whole: whether the files describe the model, so that no override needs to.
        is_slow: whether it is left out of the gate, where others have each of its settings.
    """

    kind: str
    family: str
    write: Writer
    is_whole: bool = True
    is_slow: bool = False

    @property
    def overrides(self) -> list[str]:
        return [*ALONE, *ENDS] if self.is_whole else overrides_of(self.family)


def dist(family: str, way: Way, form: Form, *, is_slow: bool = False) -> Layout:
    """Return a layout of megatron-core's `torch_dist`."""
    way = replace(way, rows=264) if way.tp > 1 else way
    hybrid = {"num_layers": 8, "hybrid_layer_pattern": "*-*-|*-*-", "is_hybrid_model": True} if form.is_hybrid else {}
    others = {"qk_layernorm": family == "qwen3", "kv_channels": 6, **hybrid}
    write = partial(torch_dist_layout.write, way=way, form=form, **others)
    return Layout("megatron", family, write, is_slow=is_slow)


def ranks(family: str, way: Way, *, is_slow: bool = False) -> Layout:
    """Return a layout of Megatron-LM's format `torch`."""
    return Layout("megatron", family, partial(megatron_layout.write, way=way), is_slow=is_slow)


def titan(folder: Path, state: StateSource, *, is_fused: bool) -> Path:
    saved = states.as_torchtitan(state)
    return states.save_dcp(folder, states.with_fused_moments(saved, state.model) if is_fused else saved)


LAYOUTS = {
    "hf": Layout("hf", "qwen3", states.write_hf),
    "hf in files": Layout("hf", "llama", partial(states.write_hf, files=3)),
    "llmc gpt2": Layout("llmc", "gpt2", lambda folder, state: states.write_llmc(folder / "model.bin", state)),
    "nanogpt": Layout("nanogpt", "gpt2 exact", states.write_nanogpt),
    "dcp": Layout("dcp", "gpt2", states.write_dcp, is_whole=False),
    "dcp flat": Layout("dcp", "llama tied", states.write_flat_dcp, is_whole=False),
    "torchtitan": Layout("dcp", "llama tied", partial(titan, is_fused=False), is_whole=False),
    "torchtitan fused": Layout("dcp", "llama", partial(titan, is_fused=True), is_whole=False),
    "universal": Layout("deepspeed", "gpt2", states.write_universal, is_whole=False),
    "universal 3": Layout("deepspeed", "llama tied", partial(states.write_universal, stage=3), is_whole=False),
    "ranks": ranks("gpt2", Way(tp=2, pp=2, vpp=2, dp=3, bucket=2000, rows=264)),
    "ranks te bf16": ranks("llama", Way(tp=2, dp=3, dtype=BF16, bucket=3000, names="te", rows=272)),
    "ranks plain": ranks("llama tied", Way(tp=2, pp=2, is_distributed=False, names="te", rows=264)),
    "ranks plain bf16": ranks("gpt2", Way(pp=2, vpp=2, is_distributed=False, dtype=BF16), is_slow=True),
    "ranks in lists": ranks("gpt2", Way(pp=4, dp=2, names="newer", form="list", bucket=3000), is_slow=True),
    "ranks of version 2": ranks(
        "gpt2", Way(tp=2, names="newer", version=2, form="older", alignment=1, rows=264), is_slow=True
    ),
    "fully": dist("llama", Way(tp=2), Form(prefix="module.")),
    "fully, no file": dist("gpt2", Way(), Form(has_file=False), is_slow=True),
    "plain bf16, numbered": dist("gpt2", Way(tp=2, dtype=BF16), Form("plain", is_stacked=False)),
    "flat": dist("llama tied", Way(tp=2, dp=2, dtype=BF16), Form("flat", "module.")),
    "buckets": dist("gpt2", Way(tp=2, pp=2, dp=3, bucket=3000), Form("buckets", has_file=False)),
    "buckets te vpp": dist("qwen3", Way(2, 2, 2, 2, names="te", dtype=BF16, bucket=2000), Form("buckets", "module.")),
    "buckets pp": dist("llama tied", Way(pp=4, dp=2), Form("buckets", is_stacked=False), is_slow=True),
    "hybrid": dist("llama", Way(tp=2), Form(is_hybrid=True, has_file=False)),
    "hybrid flat": dist("gpt2", Way(tp=2, dp=3), Form("flat", is_hybrid=True)),
    "hybrid buckets": dist("gpt2", Way(pp=2, dp=2, names="te"), Form("buckets", "module.", is_hybrid=True)),
}
EVERY = [pytest.param(n, marks=pytest.mark.slow if layout.is_slow else ()) for n, layout in LAYOUTS.items()]


@pytest.mark.parametrize("name", EVERY)
def test_a_checkpoint_comes_in_bit_for_bit(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    state = state_of(layout.family)
    found = opened(layout.kind, layout.write(tmp_path / "theirs", state), layout.overrides)
    assert found.has_optimizer == (layout.kind not in ("hf", "llmc"))
    assert_carried(found, state)
    assert found.model == replace(state.model, **of_no_file(layout.kind, found.model))


def of_no_file(kind: str, model: ModelConfig) -> dict[str, Any]:
    """Return what the files of a format leave open."""
    return {"bos_token_id": model.bos_token_id, "eos_token_id": model.eos_token_id} if kind == "nanogpt" else {}


# ---- damage

# One of each reader.
READERS = cases("hf in files, llmc gpt2, nanogpt, dcp, universal, ranks, fully", "universal 3, ranks plain, buckets")
# They only name a folder, or nothing is read from them.
SPARED = {"latest_universal", "latest_checkpointed_iteration.txt", "metadata.json"}


def files_of(path: Path) -> list[Path]:
    """Return one file of each kind: the last of those whose names differ in numbers alone."""
    files = (p for p in [path, *sorted(path.rglob("*"))] if p.is_file() and p.name not in SPARED)
    return list({re.sub(r"\d", "", p.name): p for p in files}.values())


def flipped(content: bytes, state: StateSource) -> bytes | None:
    """Return the content with a bit of some tensor flipped, in float32 or bfloat16; None if it is not of tensors."""
    tensors = [tensor for prefix in states.KINDS for tensor in states.weights_of(state, prefix).values()]
    for dtype in (torch.float32, BF16):
        for tensor in tensors:
            at = content.find(bytes(tensor.to(dtype).reshape(-1)[:8].view(torch.uint8).numpy()))
            if at >= 0:
                return content[: at + 5] + bytes([content[at + 5] ^ 1]) + content[at + 6 :]
    return None


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_or_missing_file_is_named(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    state = state_of(layout.family)
    path = layout.write(tmp_path / "theirs", state)

    def refusal() -> str:
        with pytest.raises(TrainerError) as caught:
            read_all(opened(layout.kind, path, layout.overrides))
        return str(caught.value)

    for file in files_of(path):
        content = file.read_bytes()
        for damaged in (content[: len(content) // 2], b""):
            file.write_bytes(damaged)
            assert file.name in refusal()
        if layout.kind not in ("hf", "llmc") and (damaged := flipped(content, state)):  # these two have no checksums
            file.write_bytes(damaged)
            assert str(path) in refusal()
        file.unlink()
        assert str(path) in refusal()
        file.write_bytes(content)
    assert_carried(opened(layout.kind, path, layout.overrides), state)


def drop_moments(path: Path) -> None:
    """Remove what has the optimizer's state, and leave what tells that there was one."""
    for file in [*path.rglob("distrib_optim.pt"), *path.rglob("exp_avg*.pt")]:
        file.unlink()
    for file in path.rglob("model*rng.pt"):
        states.replace_file(file, lambda table: table.update(optimizer=None))


LOST = {name: LAYOUTS[name] for name in ("universal", "ranks")}
LOST["fully"] = dist("llama", Way(), Form("weights"))


@pytest.mark.parametrize("name", LOST)
def test_an_import_without_its_moments_is_asked_for(tmp_path: Path, name: str) -> None:
    layout = LOST[name]
    state = state_of(layout.family)
    path = layout.write(tmp_path / "theirs", state)
    drop_moments(path)
    with refused(TrainerError, "--weights-only"):
        opened(layout.kind, path, layout.overrides)
    found = opened(layout.kind, path, layout.overrides, weights_only=True)
    weights = states.weights_of(state)
    assert all(torch.equal(found.read(name), weights[name]) for name in weights)


# ---- by the command


@pytest.mark.parametrize("name", cases("hf, dcp, ranks", "llmc gpt2, nanogpt, universal, fully"))
def test_a_number_that_is_not_finite_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout = LAYOUTS[name]
    state = state_of(layout.family)
    damaged = next(n for n in states.weights_of(state) if n.endswith(("c_fc.weight", "up_proj.weight")))
    tensor = state.read(damaged).clone()
    tensor[13, 7], tensor[13, 8], tensor[20, 3] = -math.inf, math.nan, math.nan
    path = layout.write(tmp_path / "theirs", replace(state, read=lambda n: tensor if n == damaged else state.read(n)))
    command = ["import", layout.kind, str(path), str(tmp_path / "run"), "--trust-pickle", *layout.overrides]
    assert convert.main(command) == 2
    text = capsys.readouterr().err
    assert re.search(r"(\.mlp\.\w+\.weight)\), found 3 of|model.safetensors, .*up_proj.weight\), found 3 of", text)
    assert not [*(tmp_path / "run").glob("iter_*"), *(tmp_path / "run").glob(".*")]


@pytest.mark.parametrize("name", cases("hf, dcp, universal, ranks", "llmc gpt2, nanogpt, universal 3, fully"))
def test_another_model_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout = LAYOUTS[name]
    path = layout.write(tmp_path / "theirs", state_of(layout.family))
    command = ["import", layout.kind, str(path), str(tmp_path / "run"), "--trust-pickle"]
    assert convert.main([*command, *overrides_of(layout.family), "model.n_layer=3"]) == 2
    text = capsys.readouterr().err
    assert re.search(r"n_layer|\.h\.3\.", text)
    assert not (tmp_path / "run").exists()
