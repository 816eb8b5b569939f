"""What the commands of a page find in their folder, and the words that make them small."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from reprise.loading import open_checkpoint
from reprise.storage import Files
from tests import ROOT
from tests.interop import states
from tests.local_folders import save_on_two_hosts
from tests.pages.page import PageRunner
from trainer.data.byte_level import bytes_tokenizer
from trainer.interop.source import of_checkpoint

# GPT-2 124M becomes the model of the demo, stores become folders, and eight ranks two.
SMALL = {
    "model=gpt2_124m": "experiment=demo",
    "s3://bucket/run": "file://$PWD/bucket/run",
    "gs://other-bucket": "file://$PWD/other-bucket",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "checkpoint.finetune=true": "checkpoint.finetune=true train.train_iters=2",
}
TWO_RUNS = """
demo="reprise train experiment=demo train.train_iters=60 logging.log_interval=10"
$demo run.dir=runs/demo/unbroken
$demo run.dir=runs/demo/killed & run=$!
until [ -d runs/demo/killed/checkpoints/iter_0000020 ]; do sleep 0.1; done; kill -9 $run
$demo run.dir=runs/demo/killed
"""


@dataclass(frozen=True)
class Page:
    """A page of docs, how many of its blocks run, and what they need.

    Attributes:
        small: words of its commands and outputs beside those of `SMALL`, and their replacements.
        prepare: makes the inputs in a folder.
        names: a program whose names the Python blocks of the page use.
        packages: packages without which its commands do not run.
    """

    name: str
    blocks: int
    small: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None
    names: str = ""
    packages: Sequence[str] = ()


def bash(folder: Path, commands: str) -> None:
    """Run commands in a folder, as a page's are."""
    status, output = PageRunner(folder).run_bash(commands)
    assert status == 0, output


def texts(folder: Path, *names: str) -> None:
    """Write JSON lines of the lines of the documents."""
    documents = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    lines = [line for document in documents for line in document.splitlines() if line]
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines), encoding="utf-8")


def two_runs(folder: Path) -> None:
    """Train a run, and another that is killed and resumed."""
    bash(folder, TWO_RUNS)


def commands(folder: Path) -> None:
    two_runs(folder)
    for name, eps in (("a", "1e-8"), ("b", "1e-7")):
        bash(folder, f"reprise train experiment=demo train.train_iters=2 run.dir=runs/{name} optimizer.adam_eps={eps}")
    for host, local in zip("ab", save_on_two_hosts(folder, 100), strict=True):
        (folder / f"host-{host}").mkdir()
        local.rename(folder / f"host-{host}" / "big")


def token_files(folder: Path) -> None:
    texts(folder, "corpus/a.jsonl", "corpus/b.jsonl")
    (folder / "data").mkdir()
    tokens = np.frombuffer((ROOT / "docs" / "design.md").read_bytes(), dtype=np.uint8).astype("<u2")
    tokens.tofile(folder / "train.bin")
    tokens[:4000].tofile(folder / "val.bin")
    (folder / "data" / "tokenizer.json").write_bytes(bytes_tokenizer())
    for name, document in (("web_0", "interop"), ("code", "reliability")):
        bash(
            folder,
            f"reprise prepare-data {ROOT}/docs/{document}.md --output {name}; mv {name}/train_*.bin data/{name}.bin",
        )


def corpus(folder: Path) -> None:
    texts(folder, "texts/a.jsonl", "texts/b.jsonl")
    (folder / "tokenizer.json").write_bytes(bytes_tokenizer())


def megatron(folder: Path) -> None:
    two_runs(folder)
    bash(folder, "mkdir old data; reprise convert export megatron runs/demo/killed old/checkpoints")
    for name, document in (("web", "interop"), ("code", "reliability")):
        bash(folder, f"reprise prepare-data {ROOT}/docs/{document}.md --format megatron --output {name}; ls {name}")
        for suffix in ("bin", "idx"):
            next((folder / name).glob(f"train*.{suffix}")).rename(folder / "data" / f"{name}.{suffix}")


def other_formats(folder: Path) -> None:
    two_runs(folder)
    export = "reprise convert export"
    bash(folder, f"{export} hf runs/demo/killed DIR")
    newest = max((folder / "runs/demo/killed/checkpoints").glob("iter_*"))
    states.write_llmc(folder / "gpt2_124M.bin", of_checkpoint(open_checkpoint(newest, Files())))
    bash(folder, f"{export} dcp runs/demo/killed SAVED; cp DIR/tokenizer.json TOKENIZER")


def base(folder: Path) -> None:
    two_runs(folder)
    bash(folder, "reprise convert export hf runs/demo/killed BASE")


MODEL_AND_OPTIMIZER = """
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIR")
optimizer = torch.optim.AdamW(model.parameters())
"""
TRAINER = """
import torch
import transformers

sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
arguments = transformers.TrainingArguments("trained", max_steps=2, report_to="none", use_cpu=True)
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
"""
LONG = "checkpoint.save_interval=500"

PAGES = [
    Page("start.md", 11),
    Page("commands.md", 10, prepare=commands),
    Page(
        "data.md",
        4,
        {"/data/": "$PWD/data/", "50257": "257", "50256": "256"},
        token_files,
    ),
    Page(
        "data_formats.md",
        1,
        {
            "examples/": f"{ROOT}/examples/",
            "data=megatron": "train.train_iters=2 train.eval_interval=0 data=megatron",
        },
        corpus,
        packages=("datatrove", "orjson", "ray"),
    ),
    Page("recipes.md", 8, {"model=gpt2_124m": "model=gpt2_124m"}),
    Page("fsdp2.md", 2),
    Page("generated/megatron_flags.md", 2),
    Page(
        "samples.md",
        1,
        {"/data/": "data/", "reprise train data": "reprise train train.train_iters=2 data"},
        token_files,
    ),
    Page(
        "from_megatron.md",
        2,
        {
            "/old/": "old/",
            "/data/": "data/",
            "seq_length=1024": "seq_length=96",
            "batch_size=512": "batch_size=8",
            "0:128 4M:256 8M:512": "0:4 100:8",
            "samples=300000000": "samples=640",
            "samples=2000000": "samples=80",
            "parallel=tp2_pp2_dp2": "parallel=tp2",
        },
        megatron,
    ),
    Page("interop.md", 6, prepare=other_formats, names=MODEL_AND_OPTIMIZER),
    Page("launching.md", 4, {"/shared/runs": "runs", "experiment=demo": "experiment=demo train.train_iters=20"}),
    Page(
        "stores.md",
        6,
        {LONG: f"experiment=demo {LONG}", "train_iters=2000": "train_iters=120", "0000500": "0000100"}
        | {"/disk/": "$PWD/disk/"},
    ),
    Page("local_checkpoints.md", 1, {"experiment=demo": "experiment=demo train.train_iters=20"}),
    Page("topologies.md", 5, {"run.name=zero3": "run.name=zero3 train.train_iters=20"}),
    Page(
        "weights.md",
        6,
        {"checkpoint.save_interval=5000": "train.train_iters=40", "256,512]": "30]", "0000512": "0000030"}
        | {"ITER": "runs/demo/killed/checkpoints/iter_0000040", "vocab_size=50432": "vocab_size=320"}
        | {"eval_interval=500": "eval_interval=20 train.train_iters=40"},
        two_runs,
        TRAINER,
    ),
    Page(
        "adapters.md",
        4,
        {"iter_0000100": "iter_0000002", "run.name=frozen": "run.name=frozen train.train_iters=2"},
        base,
    ),
]
