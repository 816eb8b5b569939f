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
Curve = list[tuple[int, str, str, str, int]]
WIDE = ("model.n_layer=4", "train.train_iters=3", "train.eval_interval=3", "train.eval_iters=1")
MODELS = {"gpt2": ("model=gpt2_tiny",), "llama3": ("model=llama3_tiny", "model.n_kv_head=2")}
_TP, _SP = "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"
_PP = "parallel.pipeline_model_parallel_size=2"
_VPP = "parallel.num_virtual_stages_per_pipeline_rank=2"
CASES = {
    "one rank": ("gpt2", 1, ("train.activation_checkpointing=true",)),
    "interleaved": ("gpt2", 2, (_PP, _VPP)),
    "sequence parallel": ("llama3", 2, (_TP, _SP)),
    "tensor parallel": ("gpt2", 2, (_TP,)),
    "1F1B": ("llama3", 2, (_PP,)),
    "ZeRO 2": ("gpt2", 2, ("parallel.zero_stage=2", "train.activation_checkpointing=true")),
    "ZeRO 3": ("llama3", 2, ("parallel.zero_stage=3",)),
    "invariant ranks": ("gpt2", 2, ("parallel.invariant_ranks=2",)),
    "compiled": ("llama3", 1, ("train.compile=true",)),
    "all axes": ("llama3", 8, (_TP, _SP, _PP, "parallel.zero_stage=1", "train.micro_batch_size=1")),
}
ALONE = {f"{model} alone": (model, 1, ()) for model in MODELS}
NIGHTLY = ("compiled", "all axes", "tensor parallel")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two files whose windows have the same last documents, and others before them."""
    folder = tmp_path_factory.mktemp("data")
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
    return folder


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


def bits(folder: Path, data: Path, name: str, case: str, *overrides: str) -> tuple[Curve, object]:
    """Return the curve and the files of a run on the last documents of a file."""
    model, ranks, axes = {**CASES, **ALONE}[case]
    files = ["data=token_file", f"data.train={data}/{name}.bin", f"data.valid={data}/valid_{name}.bin"]
    masks = ["data.document_mask=true", f"data.end_of_text={END}"]
    arguments = [f"run.dir={folder}", *MODELS[model], *TINY, *WIDE, *files, *masks, *axes, *overrides]
    ended = call_on_ranks(train_on_last_documents, arguments, folder=folder, ranks=ranks, timeout_s=120)
    assert ended.ok, ended.text
    return curve(folder), tensor_files(folder / "checkpoints/iter_0000003")


def marks(case: str) -> object:
    return () if case == "interleaved" else pytest.mark.nightly if case in NIGHTLY else pytest.mark.slow


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case)) for case in CASES])
def test_nothing_crosses_a_border(data: Path, tmp_path: Path, case: str) -> None:
    first, second = (bits(tmp_path / name, data, name, case) for name in "ab")
    assert first == second
    model, _, axes = CASES[case]
    if case != "one rank" and "train.compile=true" not in axes:
        one, _ = bits(tmp_path / "one", data, "a", f"{model} alone")
        losses, expected = ([float.fromhex(row[1]) for row in rows] for rows in (first[0], one))
        assert losses == pytest.approx(expected, abs=1e-5)  # float32 sums in another order


@pytest.mark.slow
def test_without_masks_documents_see_each_other(data: Path, tmp_path: Path) -> None:
    off = ("data.document_mask=false", "data.end_of_text=null")
    first, second = (bits(tmp_path / name, data, name, "one rank", *off)[0] for name in "ab")
    assert first != second


def test_a_masked_run_resumes_bitwise_and_is_recorded(data: Path, tmp_path: Path) -> None:
    files = ["data=megatron", f"data.train={data}/indexed_a", f"data.valid={data}/indexed_b"]
    masked = [*MODELS["llama3"], *TINY, *WIDE, *files, "train.train_iters=6", "data.document_mask=true"]
    # The index of these files ends documents behind the same tokens.
    run_ok(tmp_path / "whole", [*masked, f"data.end_of_text={END}"])
    run_ok(tmp_path / "run", [*masked, "train.exit_interval=3"])
    run_ok(tmp_path / "run", masked)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    ended = launch(tmp_path / "run", masked[:-1])
    assert not ended.ok
    assert "data.document_mask" in ended.text
