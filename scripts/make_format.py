"""Write docs/generated/format.md: tensors, `trainer_state.json` and stored values, as the code lays them out.

The command is `python -m scripts.make_format`.
"""

from __future__ import annotations

import inspect
import io
import json
import math
import tempfile
import textwrap
from collections import Counter, OrderedDict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch.torch_version import TorchVersion

from models.adapters import saved_tensors
from reprise import save
from reprise.format import FRESH, LINEAGE, Branch, Lineage, Parent
from reprise.storage import Json
from reprise.tensors import placed_box
from trainer.config.compose import compose
from trainer.data.documents import DocumentMarks
from trainer.memory.dry_run import simulate
from trainer.optim.adamw import stored_names
from trainer.record.data_origin import DataOrigin
from trainer.record.environment import environment_record
from trainer.record.run_record import describe
from trainer.run.run_data import RunData, Source
from trainer.schedules.progress import Progress

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "generated" / "format.md"

_HEAD = """\
# Tables of the checkpoint format

<!-- Written by python -m scripts.make_format from the code. -->

Which tensors, state members and values does a checkpoint have? [checkpoint_format.md](../checkpoint_format.md) says
what they mean.

## Tensors

The rows are in model order, with the first layer of a preset for all layers. `tp` is the dimension, counted from 0,
that tensor parallelism shards, in the view if there is one. `lm_head.weight` is absent if tied to the embedding. With
adapters, only the rows of `base_model.model` are there, by default for these modules and here of rank 6.
"""
_BORDER = "| tensor | shape | view | tp |\n|---|---|---|---|\n"
_STATE = """
## trainer_state.json

The state of a run on 8 ranks, with most of the optional members, here one member a line. `...` depends on the machine.

```text
{state}
```

With Muon, a schedule over samples, and padded samples, these differ:

```text
{differences}
```
"""
_EXAMPLE = """
## A worked example

With `from reprise import save`:

```python
{code}
```

The file `model.safetensors` has {size} bytes. The first 8 are `{length}`, then comes the header, filled up with spaces:

```text
{header}
```

The data is at byte {start}:

```text
{data}
```

The manifest, here one member a line; `...` differs from save to save:

```text
{manifest}
```

`header_xxh3_64` is the digest of the first {start} bytes, `digests` are those of the next 24, and of the last 8.
"""
_VALUES = """
## Values

The form of a member of `state=` under `state_dict.values`. A DTensor is `tensor.sharded` in place of `tensor`. Text is
hexadecimal UTF-8 if it has an unpaired surrogate.

| Python's type | JSON |
|---|---|
"""
_PRESETS = ("gpt2_124m", "llama3_8b", "qwen3_0.6b")
_RUN = (
    "model=gpt2_tiny",
    "model.n_layer=1",
    "parallel.tensor_model_parallel_size=2",
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
_OTHERS = ("optimizer=muon", "data.kind=megatron", "data.samples=per_document", "train.train_samples=8000")
_MACHINE_VALUES = ("processor", "math")
_MOST_CHARACTERS = 90
_COLUMNS = 116


def main() -> None:
    """Write the page and name its file."""
    OUTPUT.write_text(page(), encoding="utf-8")
    print(OUTPUT)


def page() -> str:
    """Return the page that the code describes."""
    parts = [_HEAD]
    for preset in _PRESETS:
        parts += [f"\n### {preset}\n\n{_BORDER}", *_tensor_lines(preset), *_tensor_lines(preset, "model.lora.rank=6")]
    state, second = _state(*_RUN), _state(*_RUN, *_OTHERS)
    differences = {name: value for name, value in second.items() if state.get(name) != value}
    parts += [
        _STATE.format(state=_rows_of(state), differences=_rows_of(differences)),
        _example(),
        _VALUES,
        *_value_lines(),
    ]
    return "".join(parts)


def _tensor_lines(preset: str, *overrides: str) -> Iterator[str]:
    """Yield a table row for each stored tensor."""
    common = ("model.n_layer=1", "model.tie_word_embeddings=false", "parallel.tensor_model_parallel_size=2")
    config = compose([f"model={preset}", *common, *overrides])
    (simulated,) = simulate(config, config.parallel.topology(2))
    parameters, first = stored_names(simulated.parts[0]), {"dp": 0, "tp": 0}
    boxes = {name: placed_box(name, p, simulated.grid, first)[0] for p, name in parameters.items()}
    for name, tensor in saved_tensors(config.model).items():
        sharded = [str(number) for number, size in enumerate(tensor.view) if boxes[name].shape[number] < size]
        view = "" if tensor.view == tensor.shape else f"{list(tensor.view)}"
        row = f"| `{name}` | {list(tensor.shape)} | {view} | {', '.join(sharded)} |\n"
        yield row.replace("|  |", "| |").replace("|  |", "| |")


def _state(*overrides: str) -> Json:
    """Return a run's state, without what depends on the machine."""
    config = compose(overrides)
    environment = environment_record(config, torch.device("cpu"), 2) | {"torch": "..."}
    blank = {name: dict.fromkeys(environment[name], "...") for name in _MACHINE_VALUES}
    weights = {"d3": Fraction(7, 10), "d4": Fraction(3, 10)}
    data = RunData([Source("", (), share, name, "d5") for name, share in weights.items()], (), "d2", DocumentMarks(0))
    description = describe(
        config,
        schedule=config.learning_rates,
        topology=config.parallel.topology(8),
        environment=environment | blank,
        data=data.record(config),
    )
    blend = DataOrigin(400, {"d3": 300, "d6": 100}).record()
    lineage = Lineage((Branch("r1", FRESH), Branch("r2", 60)), Parent("r0", 200)).record()
    progress = Progress(iteration=100, consumed_samples=800, consumed_tokens=102400, best_loss=3.25, valid_loss=3.5)
    return progress.state_record(0.0006, {**description, "blend": blend, LINEAGE: lineage})


def _rows_of(table: Json) -> str:
    """Return JSON with a member on each line."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in table.items()]
    rows = [textwrap.fill(line, _COLUMNS, subsequent_indent="    ", break_on_hyphens=False) for line in lines]
    return "{\n" + "\n".join(rows).removesuffix(",") + "\n}"


def _example() -> str:
    """Return a small checkpoint's section: its tensor file byte by byte, and its manifest."""
    with tempfile.TemporaryDirectory() as folder:
        path = _save_example(folder)
        data = (path / "model.safetensors").read_bytes()
        manifest = json.loads((path / "manifest.json").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    return _EXAMPLE.format(
        code=inspect.getsource(_save_example).rstrip(),
        size=len(data),
        length=data[:8].hex(" "),
        header=data[8:start].decode().rstrip(),
        start=start,
        data=data[start:].hex(" ", 4),
        manifest=_rows_of({**manifest, "attempt": "...", "xxh3_64": "..."}),
    )


def _save_example(folder: str) -> Path:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        model.bias.copy_(torch.tensor([0.5, -0.5]))
    return save(folder, model, iteration=7)


def _value_lines() -> Iterator[str]:
    """Yield a table row for each kind of value that JSON lacks, with what a checkpoint has for it."""
    values: list[object] = [
        {3: "a"},
        OrderedDict(a=1),
        Counter("aab"),
        (1, 2),
        torch.Size([2, 3]),
        {1, 2},
        frozenset({1}),
        -math.inf,
        math.nan,
        -(10**308),
        1 + 2j,
        "\ud800",
        b"\x01\xff",
        bytearray(b"\x01"),
        io.BytesIO(b"\x01"),
        torch.bfloat16,
        torch.device("cuda:0"),
        TorchVersion("2.13.0"),
        np.array([1, 2], np.int16),
        np.float32(0.5),
        [torch.zeros(2)],
    ]
    with tempfile.TemporaryDirectory() as folder:
        members = {str(number): value for number, value in enumerate(values)}
        path = save(folder, torch.nn.Linear(1, 1), iteration=1, state=members)
        stored = json.loads((path / "trainer_state.json").read_bytes())["state_dict"]["values"]
    for number, value in enumerate(values):
        text = json.dumps(stored[f"/{number}"])
        cell = text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS // 2]}...{text[-10:]}"
        yield f"| `{type(value).__name__}` | `{cell}` |\n"


if __name__ == "__main__":
    main()
