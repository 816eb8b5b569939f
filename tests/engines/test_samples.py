"""A run on the arrow files of `datasets`, killed and gone on with at another number of ranks, keeps its bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.engines.programs import needs
from tests.harness import TINY, checkpoint, curve, launch, run_ok, tensor_files

pytestmark = needs("datasets", "pyarrow")
RUN = (
    "model=gpt2_tiny",
    *TINY,
    "train.threads=1",
    "train.train_iters=12",
    "train.eval_interval=6",
    "train.eval_iters=1",
    "parallel.invariant_ranks=2",
    "checkpoint.save_interval=3",
    "checkpoint.reshard=true",
    "data=module",
    "data.factory=examples.datasets_samples:make",
)


def test_arrow_files_keep_their_bits_over_a_kill(tmp_path: Path) -> None:
    from datasets import Dataset

    rng = np.random.default_rng(1)
    for name, size in {"web": 40, "code": 25, "valid": 12}.items():
        lengths = rng.integers(8, 18, size)
        rows = {"input_ids": [rng.integers(0, 257, length).tolist() for length in lengths]}
        if name == "code":
            rows["is_target"] = [[number > 3 for number in range(length)] for length in lengths]
        Dataset.from_dict(rows).save_to_disk(str(tmp_path / name))
    sources = ", ".join(f"{{path: {tmp_path / name}, weight: {weight}}}" for name, weight in (("web", 2), ("code", 1)))
    words = [*RUN, f"data.train=[{sources}]", f"data.valid={tmp_path / 'valid'}"]
    run_ok(tmp_path / "unbroken", words)
    launch(tmp_path / "killed", words, ranks=2, kill_after=7, saved=6)
    run_ok(tmp_path / "killed", words)
    assert curve(tmp_path / "killed") == curve(tmp_path / "unbroken")  # 144 samples: two epochs of each
    for iteration in (6, 12):
        files = [tensor_files(checkpoint(tmp_path / run, iteration)) for run in ("killed", "unbroken")]
        assert files[0] == files[1]
