"""EleutherAI's lm-evaluation-harness runs a local task on a checkpoint, with no argument but its folder.

Where it is not installed these tests are skipped: `pip install 'torch-reprise[eval]'`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.harness import TINY, run_ok
from tests.resume.test_hugging_face import our_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed"),
]

TEXTS = ["def f(): return 1", "import os", "for x in y: pass"]
TASK = """
task: lines
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


def our_bits_per_byte(iteration: Path, overrides: list[str]) -> float:
    """Return the bits per byte of `TEXTS` after the end of a text, by our model on our stored tensors."""
    model, nats, count = our_model(iteration, overrides), 0.0, 0
    for text in TEXTS:
        tokens = torch.tensor([256, *text.encode()])
        with torch.no_grad():
            logits = model(tokens[None, :-1])[0, :, :257]
        nats += cross_entropy(logits.double(), tokens[1:], reduction="sum").item()
        count += len(text.encode())
    return nats / count / math.log(2)


def test_a_local_task_runs_on_the_folder_alone(tmp_path: Path) -> None:
    overrides = ["model=gpt2_tiny", *TINY, "train.train_iters=20", "train.micro_batch_size=12"]
    run_ok(tmp_path / "run", overrides)
    iteration = tmp_path / "run/checkpoints/iter_0000020"
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "lines.yaml").write_text(TASK.replace("DATA", str(tmp_path / "lines.jsonl")))
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={iteration}"]
    command += ["--tasks", "lines", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **offline}, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["lines"]["bits_per_byte,none"]
    # float32 sums in another order.
    assert found == pytest.approx(our_bits_per_byte(iteration, overrides), rel=1e-5)
