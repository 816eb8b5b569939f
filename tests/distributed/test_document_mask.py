"""With `data.document_mask` no bit of an iteration crosses the border of a document, on any topology.

Two runs train on the last document of every window alone. Their data differ in all documents before it, so their bits
are equal only if nothing of these reaches it: no activation, no gradient, no position.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import trainer.__main__
from tests.harness import TINY, call_on_ranks, curve, launch, run_ok, tensor_files
from trainer.data.documents import ModelInputs, WindowForm
from trainer.data.indexed_file import write_indexed_file
from trainer.data.token_file import write_token_file

END, LENGTH = 256, 16
WIDE = ("model.n_layer=4", "train.train_iters=3", "train.eval_interval=3", "train.eval_iters=1")
MODELS = {"gpt2": ("model=gpt2_tiny",), "llama3": ("model=llama3_tiny", "model.n_kv_head=2")}
_TP, _SP = "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"
_PP = "parallel.pipeline_model_parallel_size=2"
_VPP = "parallel.num_virtual_stages_per_pipeline_rank=2"
CHEAP = {
    "one rank": ("gpt2", 1, ("train.activation_checkpointing=true",)),
    "interleaved": ("gpt2", 2, (_PP, _VPP)),
}
DEAR = {
    "sequence parallel": ("llama3", 2, (_TP, _SP)),
    "tensor parallel": ("gpt2", 2, (_TP,)),
    "1F1B": ("llama3", 2, (_PP,)),
    "ZeRO 0": ("gpt2", 2, ("parallel.zero_stage=0",)),
    "ZeRO 1": ("llama3", 2, ("parallel.zero_stage=1",)),
    "ZeRO 2": ("gpt2", 2, ("parallel.zero_stage=2", "train.activation_checkpointing=true")),
    "ZeRO 3": ("llama3", 2, ("parallel.zero_stage=3",)),
    "invariant ranks": ("gpt2", 2, ("parallel.invariant_ranks=2",)),
    "compiled": ("llama3", 1, ("train.compile=true",)),
    "all axes": ("llama3", 8, (_TP, _SP, _PP, "parallel.zero_stage=1", "train.micro_batch_size=1")),
    "dropout": ("gpt2", 2, (_TP, _SP, "model.dropout=0.1")),
}
CASES = {**CHEAP, **DEAR}
_MARKS = [pytest.mark.slow, pytest.mark.nightly]


def write_data(folder: Path) -> None:
    """Write two files whose windows have the same last documents, and others before them."""
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, END, 60 * LENGTH + 1)
    other = (tokens + 1) % END
    for window in range(60):
        first = window * LENGTH
        ends = np.sort(rng.choice(np.arange(2, LENGTH - 2), 2, replace=False)) + first
        for found in (tokens, other):
            found[ends] = END
        other[first] = tokens[first]  # the last target of the window before
        other[ends[1] : first + LENGTH] = tokens[ends[1] : first + LENGTH]
    other[-1] = tokens[-1]
    for name, found in (("a", tokens), ("b", other)):
        write_token_file(folder / f"{name}.bin", [found], dtype=np.uint16)
        write_token_file(folder / f"valid_{name}.bin", [found, found[: LENGTH + 1]], dtype=np.uint16)
        write_indexed_file(folder / f"indexed_{name}.bin", [found], dtype=np.dtype(np.uint16), end_of_text=END)


def train_on_last_documents(arguments: list[str]) -> None:
    """Train and evaluate with the targets of all documents except the last of each window left out."""
    whole = WindowForm.split

    def last_only(form: WindowForm, windows: torch.Tensor) -> ModelInputs:
        inputs = whole(form, windows)
        tokens = windows.remainder(1 << 32)
        positions = torch.arange(1, LENGTH + 1)
        last = torch.where(tokens[:, :LENGTH] == END, positions, 0).amax(1, keepdim=True)
        targets = tokens[:, 1:].where(positions > last, -100)
        return ModelInputs(inputs.tokens, targets, inputs.starts)

    WindowForm.split = last_only  # type: ignore[method-assign]
    trainer.__main__.main(arguments)


def bits(folder: Path, data: Path, case: str, *, masks: bool = True) -> tuple[object, ...]:
    model, ranks, overrides = CASES[case]
    options = [
        f"data.train={data}",
        f"data.valid={data.with_name(f'valid_{data.name}')}",
        f"data.document_mask={masks}".lower(),
    ]
    ends = [f"data.end_of_text={END}"] if masks else []
    arguments = [f"run.dir={folder}", *MODELS[model], *TINY, *WIDE, "data=token_file", *options, *ends, *overrides]
    ended = call_on_ranks(train_on_last_documents, arguments, folder=folder, ranks=ranks, timeout_s=120)
    assert ended.ok, ended.text
    return curve(folder), tensor_files(folder / "checkpoints/iter_0000003")


@pytest.mark.parametrize("case", [*CHEAP, *(pytest.param(case, marks=_MARKS) for case in DEAR)])
def test_nothing_crosses_a_border(tmp_path: Path, case: str) -> None:
    write_data(tmp_path)
    found = [bits(tmp_path / f"run_{name}", tmp_path / f"{name}.bin", case) for name in "ab"]
    assert found[0] == found[1]


def test_without_masks_documents_see_each_other(tmp_path: Path) -> None:
    write_data(tmp_path)
    curves = [bits(tmp_path / f"run_{n}", tmp_path / f"{n}.bin", "one rank", masks=False)[0] for n in "ab"]
    assert curves[0] != curves[1]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("case", [case for case in CASES if case != "dropout"])
def test_every_topology_has_the_losses_of_one_rank(tmp_path: Path, case: str) -> None:
    write_data(tmp_path)
    model, ranks, overrides = CASES[case]
    data = ["data=token_file", f"data.train={tmp_path}/a.bin", f"data.valid={tmp_path}/b.bin"]
    options = [*MODELS[model], *TINY, *WIDE, *data, "data.document_mask=true", f"data.end_of_text={END}"]
    run_ok(tmp_path / "one", options)
    run_ok(tmp_path / "many", [*options, *overrides], ranks=ranks)
    one, many = ([float.fromhex(row[1]) for row in curve(tmp_path / name)] for name in ("one", "many"))
    assert many == pytest.approx(one, abs=1e-5)  # float32 sums in another order


def test_a_masked_run_resumes_bitwise_and_is_recorded(tmp_path: Path) -> None:
    write_data(tmp_path)
    data = ["data=megatron", f"data.train={tmp_path}/indexed_a", f"data.valid={tmp_path}/indexed_b"]
    masked = [*MODELS["llama3"], *TINY, *WIDE, *data, "data.document_mask=true", "train.train_iters=6"]
    run_ok(tmp_path / "whole", masked)
    run_ok(tmp_path / "run", [*masked, "train.exit_interval=3"])
    run_ok(tmp_path / "run", masked)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    # The index of these files ends documents behind the same tokens.
    run_ok(tmp_path / "tokens", [*masked, f"data.end_of_text={END}"])
    assert curve(tmp_path / "tokens") == curve(tmp_path / "whole")
    ended = launch(tmp_path / "run", [*masked[:-2], "train.train_iters=6"])
    assert not ended.ok
    assert "data.document_mask  saved index  current nothing" in ended.text
