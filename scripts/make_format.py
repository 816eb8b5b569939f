"""Write docs/generated/format.md: tensors, `trainer_state.json` and stored values, as the code lays them out.

The command is `python -m scripts.make_format`.
"""

from __future__ import annotations

import inspect
import io
import json
import math
import re
import tempfile
import textwrap
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch.torch_version import TorchVersion

from models.adapters import saved_tensors
from models.config import Family, ModelConfig
from reprise import save
from reprise.format import FRESH, LINEAGE, Branch, Lineage, Parent
from reprise.storage import Json
from trainer.config.compose import compose
from trainer.config.derived import length_of, topology_of
from trainer.config.schema import Config
from trainer.data.documents import DocumentMarks
from trainer.memory.dry_run import boxes_at, simulate
from trainer.record.data_origin import DataOrigin
from trainer.record.environment import environment_record
from trainer.record.run_record import describe
from trainer.run.run_data import RunData, Source
from trainer.schedules.lr import resolve
from trainer.schedules.progress import Progress

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "generated" / "format.md"

_HEAD = """\
# Tables of the checkpoint format

<!-- Written by python -m scripts.make_format from the code. -->

Which tensors, state members and values does a checkpoint have? [checkpoint_format.md](../checkpoint_format.md) says
what they mean.

## Tensors

The rows are in model order, and `i` is a layer. `tp` is the dimension, counted from 0, that tensor parallelism shards,
in the view if there is one. `E` is `model.n_embd`, `I` `model.intermediate_size`, `V` `model.vocab_size`, `P`
`model.max_position_embeddings`, `H` the width of all heads, `K` that of all key-value heads, `D` `model.head_dim` and
`R` `model.lora.rank`. `lm_head.weight` is absent if tied to the embedding. With adapters, only
the rows of `base_model.model` are there, by default for these modules.
"""
_STATE = """
## trainer_state.json

The state of a run on 8 ranks, with most of the optional members, here one member a line. `...` depends on the machine.

```text
{state}
```

With Muon, a schedule over samples, and padded samples:

```text
{others}
```
"""
_VALUES = """
## Values

The form of a member of `state=` under `state_dict.values`. A DTensor is `tensor.sharded` in place of `tensor`.

| Python | JSON |
|---|---|
"""
_BORDER = "| tensor | shape | view | tp |\n|---|---|---|---|\n"
_EXAMPLE = """
## A worked example

```python
import torch
from reprise import save

{code}
```

The file `example/iter_0000007/model.safetensors` has {size} bytes, and its data starts at 8 + 0x{length:04x}:

```text
{dump}
```

The manifest, without its line breaks; `...` differs from save to save:

```text
{manifest}
```

`{header}` is the digest of the first {start} bytes, `{weight}` of the next 24, `{bias}` of the last 8.
"""
_TITLES = {Family.gpt2: "GPT-2", Family.llama3: "LLaMA-3", Family.qwen3: "Qwen3"}
# Sizes that differ from each other, so that each dimension shows which one it is.
_SIZES = {"n_embd": 48, "intermediate_size": 56, "vocab_size": 322, "max_position_embeddings": 34, "n_head": 4}
_RANK, _HEAD_WIDTH, _KEY_VALUE_HEADS, _LAYERS = 6, 10, 2, 1
_MACHINE_VALUES = ("torch", "processor", "math")
_MOST_CHARACTERS = 90
_COLUMNS = 116


def main() -> None:
    """Write the page and name its file."""
    OUTPUT.write_text(page(), encoding="utf-8")
    print(OUTPUT)


def page() -> str:
    """Return the page that the code describes."""
    parts = [_HEAD]
    for family, title in _TITLES.items():
        parts += [
            f"\n### {title}\n\n{_BORDER}",
            *_tensor_lines(family),
            *_tensor_lines(family, f"model.lora.rank={_RANK}"),
        ]
    parts.append(_STATE.format(state=_rows_of(_state()), others=_rows_of(_other_members())))
    parts.append(_example())
    parts.append(_VALUES)
    parts += [f"| `{text}` | `{_shortened(json.dumps(value))}` |\n" for text, value in _stored_values().items()]
    return "".join(parts)


def _tensor_lines(family: Family, *overrides: str) -> Iterator[str]:
    """Yield a table row for each stored tensor."""
    config = _config_of(family, *overrides)
    letters = _letters(config.model)
    (simulated,) = simulate(config, topology_of(config, 2))
    boxes = boxes_at(simulated.parts[0], simulated.grid, tp=0)
    for name, tensor in saved_tensors(config.model).items():
        sharded = [number for number, size in enumerate(tensor.view) if boxes[name].shape[number] < size]
        shape, view = (_dimensions(sizes, letters) for sizes in (tensor.shape, tensor.view))
        cells = [name.replace(".0.", ".i."), shape, "" if view == shape else view]
        row = [*(cell and f"`{cell}`" for cell in cells), ", ".join(map(str, sharded))]
        yield "".join(f"| {cell} " if cell else "| " for cell in row) + "|\n"


def _config_of(family: Family, *overrides: str) -> Config:
    sizes = dict(_SIZES)
    if family is not Family.gpt2:
        sizes["n_kv_head"] = _KEY_VALUE_HEADS
    if family is Family.qwen3:
        sizes["head_dim"] = _HEAD_WIDTH
    words = [f"model.{name}={size}" for name, size in sizes.items()]
    return compose(
        [
            f"model={family.value}_tiny",
            *words,
            f"model.n_layer={_LAYERS}",
            "model.tie_word_embeddings=false",
            "parallel.tensor_model_parallel_size=2",
            *overrides,
        ]
    )


def _letters(model: ModelConfig) -> dict[int, str]:
    """Return the letter of each dimension, by its size. Only those of Qwen3 have heads of their own width."""
    return {
        model.head_width * model.n_head: "H",
        model.head_width * model.n_kv_head: "K",
        model.head_width: "D",
        model.n_embd: "E",
        model.n_embd * 3: "3E",
        model.intermediate_size: "I",
        model.vocab_size: "V",
        model.max_position_embeddings: "P",
        _RANK: "R",
        3: "3",
    }


def _dimensions(shape: Sequence[int], letters: Mapping[int, str]) -> str:
    return f"[{', '.join(letters[size] for size in shape)}]"


def _state() -> Json:
    """Return the state of a run with most optional members, without what depends on the machine."""
    config = _config_of(
        Family.gpt2,
        "model.tie_word_embeddings=true",
        "parallel.replicate=2",
        "parallel.invariant_ranks=4",
        "optimizer.moments_dtype=bfloat16",
        "train.ema_decay=0.999",
        "train.eval_interval=100",
        "train.skip_samples=[320-640]",
        "train.freeze=[transformer.wpe.weight]",
        "train.batch_schedule='0:8 4000:16'",
        "train.global_batch_size=16",
        "train.micro_batch_size=2",
    )
    origin = DataOrigin(400, {"d3": 300, "d6": 100})
    lineage = Lineage((Branch("r1", FRESH), Branch("r2", 60)), Parent("r0", 200))
    record = {**_description(config), "blend": origin.record(), LINEAGE: lineage.record()}
    progress = Progress(iteration=100, consumed_samples=800, consumed_tokens=102400, best_loss=3.25, valid_loss=3.5)
    return progress.state_record(0.0006, record)


def _other_members() -> Json:
    """Return the members of other settings."""
    config = _config_of(
        Family.gpt2,
        "optimizer=muon",
        "data.kind=megatron",
        "data.samples=per_document",
        "train.train_samples=8000",
    )
    description = _description(config)
    optimizer = {**description["optimizer"], "groups": "..."}
    return {name: description[name] for name in ("schedule", "adam", "muon", "data")} | {"optimizer": optimizer}


def _description(config: Config) -> Json:
    schedule = resolve(config.schedule, length_of(config.train), config.optimizer.lr)
    environment = environment_record(config, torch.device("cpu"), 2)
    weights = {"d3": Fraction(7, 10), "d4": Fraction(3, 10)}
    sources = [Source("", (), weight, name, "d5") for name, weight in weights.items()]
    data = RunData(sources, (), "d2", DocumentMarks(0))
    return describe(
        config,
        schedule=schedule,
        topology=topology_of(config, 8),
        environment={**environment, **{name: _blank(environment[name]) for name in _MACHINE_VALUES}},
        data={**data.record(config), "fingerprint": "d1", "documents": "d5"},
    )


def _blank(value: object) -> object:
    """Return a value with dots for its text, which depends on the machine."""
    return dict.fromkeys(value, "...") if isinstance(value, dict) else "..."


def _rows_of(table: Json) -> str:
    """Return JSON with a member on each line."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in table.items()]
    rows = [textwrap.fill(line, _COLUMNS, subsequent_indent="    ", break_on_hyphens=False) for line in lines]
    return "{\n" + "\n".join(rows).removesuffix(",") + "\n}"


def _example() -> str:
    """Return a small checkpoint's section: its tensor file byte by byte, and its manifest."""
    with tempfile.TemporaryDirectory() as folder:
        path = _save_example(f"{folder}/example")
        data = (path / "model.safetensors").read_bytes()
        manifest = json.loads((path / "manifest.json").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header_end = len(data[:start].rstrip())
    tensors = manifest["tensors"]
    code = inspect.getsource(_save_example).split('"""\n')[1].replace("return save(folder", 'save("example"')
    return _EXAMPLE.format(
        code=textwrap.dedent(code).rstrip(),
        size=len(data),
        length=start - 8,
        start=start,
        dump="\n".join([*_dump(data, 0, header_end), "          (spaces)", *_dump(data, start, len(data))]),
        manifest=_manifest_lines({**manifest, "attempt": "...", "xxh3_64": "..."}),
        header=manifest["files"]["model.safetensors"]["header_xxh3_64"],
        weight=tensors["weight"]["digests"],
        bias=tensors["bias"]["digests"],
    )


def _save_example(folder: str) -> Path:
    """Save the worked example."""
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        model.bias.copy_(torch.tensor([0.5, -0.5]))
    return save(folder, model, iteration=7)


def _dump(data: bytes, begin: int, end: int) -> Iterator[str]:
    """Yield lines of 16 bytes as xxd prints them."""
    for offset in range(begin, end, 16):
        row = data[offset : offset + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield f"{offset:08x}: {row.hex(' ', 2)}  {text}".rstrip()


def _manifest_lines(manifest: Json) -> str:
    text = json.dumps(manifest, separators=(",", ":"))
    return re.sub(r',(?="(?:files|aliases|tensors|bias|xxh3_64":"\.|[\w.]+json)")', ",\n", text)


def _stored_values() -> Json:
    """Return what a checkpoint has for values that JSON lacks, by their text."""
    values = {
        "{3: 'a'}": {3: "a"},
        "OrderedDict(a=1)": OrderedDict(a=1),
        "Counter('aab')": Counter("aab"),
        "(1, 2)": (1, 2),
        "torch.Size([2, 3])": torch.Size([2, 3]),
        "{1, 2}": {1, 2},
        "frozenset({1})": frozenset({1}),
        "-math.inf": -math.inf,
        "math.nan": math.nan,
        "-(10**308)": -(10**308),
        "1 + 2j": 1 + 2j,
        "'\\ud800'": "\ud800",
        "b'\\x01\\xff'": b"\x01\xff",
        "bytearray(b'\\x01')": bytearray(b"\x01"),
        "io.BytesIO(b'\\x01')": io.BytesIO(b"\x01"),
        "torch.bfloat16": torch.bfloat16,
        "torch.device('cuda:0')": torch.device("cuda:0"),
        "torch.__version__": TorchVersion("2.13.0"),
        "np.array([1, 2], np.int16)": np.array([1, 2], np.int16),
        "np.float32(0.5)": np.float32(0.5),
        "[torch.zeros(2)]": [torch.zeros(2)],
    }
    with tempfile.TemporaryDirectory() as folder:
        members = {str(number): value for number, value in enumerate(values.values())}
        path = save(folder, torch.nn.Linear(1, 1), iteration=1, state=members)
        stored = json.loads((path / "trainer_state.json").read_bytes())["state_dict"]["values"]
    return {text: stored[f"/{number}"] for number, text in enumerate(values)}


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS // 2]}...{text[-10:]}"


if __name__ == "__main__":
    main()
