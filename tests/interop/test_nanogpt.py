"""A checkpoint as nanoGPT writes it is imported whole, and a run continues with nanoGPT's own losses."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.build import build_model
from models.config import Activation
from models.families import stored_tensors
from reprise.errors import CheckpointError, ConfigError, MismatchError
from tests.harness import TINY, compose, curve, run_ok
from tests.sample_order import sample_ids
from tests.unit.model_samples import fill
from trainer.commands import convert
from trainer.data.batches import Samples
from trainer.data.corpus import default_cache, prepare
from trainer.data.token_file import open_token_file
from trainer.interop.formats import ImportOptions
from trainer.interop.nanogpt import read_source
from trainer.interop.source import StateSource
from trainer.run.build import describe_alone

MOMENTS = ("exp_avg", "exp_avg_sq")
SAVED, END = 3, 8
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 20, "block_size": 32, "vocab_size": 260}
MODEL = [
    "model=gpt2_tiny",
    *TINY,
    "model.intermediate_size=80",
    "model.vocab_size=260",
    "model.bos_token_id=259",
    "model.eos_token_id=259",
]
RUN = [*MODEL, "train.micro_batch_size=12", f"train.train_iters={END}", "optimizer.lr=1e-2", "schedule.min_lr=1e-3"]
LINEAR = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


@dataclass(frozen=True)
class Version:
    """What a version of nanoGPT, and its settings, make of a model: `is_old` is that of before May 2023."""

    bias: bool = True
    prefix: str = ""
    is_old: bool = False
    layers: int = 2

    @property
    def weight_decay(self) -> float:
        return 0.0 if self.is_old else 0.1  # of linear layers alone in the old version, which no run of ours has

    @property
    def sizes(self) -> dict[str, int]:
        return {**SIZES, "n_layer": self.layers}


class _Norm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(attended.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, width: int, bias: bool, form: str) -> None:
        super().__init__()
        self.form = form
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.form))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, form: str) -> None:
        super().__init__()
        self.ln_1, self.attn = _Norm(width, bias), _Attention(width, heads, bias)
        self.ln_2, self.mlp = _Norm(width, bias), _MLP(width, bias, form)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """The model of nanoGPT's `model.py`, under its names: exact GELU, `nn.Linear`, optional biases, a tied output."""

    def __init__(self, version: Version) -> None:
        super().__init__()
        width, heads, bias = SIZES["n_embd"], SIZES["n_head"], version.bias
        form = "tanh" if version.is_old else "none"
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(SIZES["vocab_size"], width),
            "wpe": nn.Embedding(SIZES["block_size"], width),
            "h": nn.ModuleList(_Block(width, heads, bias, form) for _ in range(version.layers)),
            "ln_f": _Norm(width, bias),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(width, SIZES["vocab_size"], bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


def optimizer_of(model: NanoGPT, version: Version) -> torch.optim.AdamW:
    """Return AdamW as `configure_optimizers` makes it."""
    named = dict(model.named_parameters())
    groups = [[n for n, p in named.items() if p.dim() >= 2], [n for n, p in named.items() if p.dim() < 2]]
    if version.is_old:
        groups = [sorted(n for n in named if n.endswith(LINEAR)), sorted(n for n in named if not n.endswith(LINEAR))]
    settings = [
        {"params": [named[n] for n in g], "weight_decay": w}
        for g, w in zip(groups, (version.weight_decay, 0.0), strict=True)
    ]
    return torch.optim.AdamW(settings, lr=1e-2, betas=(0.9, 0.95))


def batches() -> list[Tensor]:
    """Return the samples of each iteration of `RUN`, [samples, tokens + 1]."""
    config = compose(RUN)
    train, corpus = config.train, prepare(config.data, cache=default_cache(os.environ, Path.home()))
    samples = Samples([open_token_file(path) for path in corpus.train], seq_length=train.seq_length)
    ids = sample_ids(0, END * train.global_batch_size, epoch_size=samples.count, seed=train.seed)
    windows = samples.windows(ids).reshape(END, train.global_batch_size, train.seq_length + 1)
    return list(torch.from_numpy(windows).long())


def trained(version: Version, path: Path) -> tuple[NanoGPT, list[float]]:
    """Train as nanoGPT does and save on the way; return the saved model and the losses after it."""
    torch.manual_seed(5)
    model = NanoGPT(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    optimizer, losses = optimizer_of(model, version), list[float]()
    schedule, _ = describe_alone(compose(RUN))
    for iteration, windows in enumerate(batches()):
        if iteration == SAVED:
            save(path, model, optimizer, version)
        for group in optimizer.param_groups:
            group["lr"] = schedule.at(iteration + 1, 0)
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    prefix = len(version.prefix)
    weights = {name[prefix:]: value for name, value in torch.load(path)["model"].items()}
    model.load_state_dict({name: value for name, value in weights.items() if not name.endswith(".attn.bias")})
    return model, losses[SAVED:]


def save(
    path: Path,
    network: NanoGPT,
    adamw: torch.optim.AdamW,
    version: Version,
    **others: Any,
) -> None:
    """Write `ckpt.pt` as `train.py` does, with other members in place of its own."""
    module = {version.prefix + name: value for name, value in network.state_dict().items()}
    if version.is_old:  # which could not yet do without the masks
        module |= {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 32, 32).tril() for n in range(version.layers)}
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = {
        "model": module,
        "optimizer": adamw.state_dict(),
        "model_args": {**version.sizes, "bias": version.bias, "dropout": 0.0},
        "iter_num": SAVED,
        "best_val_loss": torch.tensor(3.5),
        "config": {"dataset": "shakespeare_char", "learning_rate": 1e-3},
    }
    torch.save(saved | others, path)


def stepped(version: Version) -> tuple[NanoGPT, torch.optim.AdamW]:
    """Return a model and its optimizer after one step on random gradients."""
    torch.manual_seed(5)
    model = NanoGPT(version)
    optimizer = optimizer_of(model, version)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    return model, optimizer


def opened(path: Path, *overrides: str, **options: Any) -> StateSource:
    return read_source(path, ImportOptions(compose(list(overrides)), trusts_pickle=True, **options))


def assert_carried(source: StateSource, model: NanoGPT, state: dict[nn.Parameter, Any] | None) -> None:
    """Compare every weight and moment bit for bit, in transformers' orientation."""
    named = dict(model.named_parameters())
    for name, tensor in stored_tensors(source.model).items():
        expected = {"": named[name].detach()} if name in named else {"": torch.zeros(tensor.shape)}
        if state is not None:
            entry = state[named[name]] if name in named else {}
            expected |= {f"{key}.": entry.get(key, torch.zeros(tensor.shape)) for key in MOMENTS}
            assert source.read(f"step.{name}").item() == (1.0 if name in named else 0.0)
        for key, value in expected.items():
            turned = value.T if name.endswith(LINEAR) else value
            assert torch.equal(source.read(key + name), turned), key + name


VERSIONS = {
    "with biases": Version(),
    "compiled, without biases": Version(bias=False, prefix="_orig_mod."),
    "before May 2023": Version(is_old=True),
}


@pytest.mark.parametrize("name", VERSIONS)
def test_a_run_continues_with_the_losses_of_nanogpt(tmp_path: Path, name: str) -> None:
    version = VERSIONS[name]
    theirs, expected = trained(version, tmp_path / "out/ckpt.pt")
    others = [f"optimizer.weight_decay={version.weight_decay}"]
    others += [] if version.bias else ["train.freeze=['*.bias']"]
    run, form = tmp_path / "run", Activation.gelu_tanh if version.is_old else Activation.gelu
    command = ["import", "nanogpt", str(tmp_path / "out"), str(run / "checkpoints"), "--trust-pickle"]
    # The model is that of the file.
    assert convert.main([*command, *(o for o in RUN if not o.startswith("model")), *others]) == 0
    overrides = [*RUN, f"model.activation={form.value}", *others]
    run_ok(run, overrides)
    losses = [float.fromhex(row[1]) for row in curve(run)]
    differences = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    print(name, differences)
    assert len(differences) == END - SAVED == 5
    assert differences[0] <= 1e-6
    assert max(differences) <= 1e-5
    assert min(abs(a - b) for a, b in itertools.pairwise(expected)) > 1e-3  # moments and rates matter
    source = opened(tmp_path / "out")
    assert_carried(source, theirs, None)
    ours = fill(build_model(compose(overrides).model), {n: source.read(n) for n in stored_tensors(source.model)})
    tokens = torch.randint(0, 260, (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "version",
    [Version(layers=11), Version(layers=11, is_old=True), Version(bias=False, prefix="_orig_mod.")],
    ids=["since May 2023", "before, by sorted names", "without biases"],
)
def test_every_weight_and_moment_of_nanogpt_is_carried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: Version
) -> None:
    caplog.set_level("INFO", "trainer.interop")
    model, optimizer = stepped(version)
    save(tmp_path / "ckpt.pt", model, optimizer, version, iter_num=1)
    source = opened(tmp_path / "ckpt.pt")
    assert source.iteration == 1
    assert (source.model.vocab_size, source.model.n_layer) == (260, version.layers)
    assert_carried(source, model, optimizer.state)
    assert ("13 are zero, and a run trains them" in caplog.text) is not version.bias
    assert f"model.activation={'gelu_tanh' if version.is_old else 'gelu'}," in caplog.text
    caplog.clear()
    opened(tmp_path / "ckpt.pt", "train.freeze=['*.bias']")
    assert "a run trains them" not in caplog.text


def test_weights_alone_need_no_optimizer_of_nanogpt(tmp_path: Path) -> None:
    model, _ = stepped(Version())
    save(tmp_path / "ckpt.pt", model, torch.optim.AdamW(model.parameters()), Version())
    source = opened(tmp_path, weights_only=True)
    assert (source.iteration, source.has_optimizer) == (0, False)
    assert_carried(source, model, None)


class Code:
    """Runs code when a naive reader unpickles it."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.proof,)


def test_code_in_a_file_of_nanogpt_does_not_run(tmp_path: Path) -> None:
    model, optimizer = stepped(Version())
    for member in ("config", "optimizer", "model"):
        save(tmp_path / "ckpt.pt", model, optimizer, Version(), **{member: Code(tmp_path / "ran")})
        with pytest.raises(CheckpointError, match="A file of torch cannot be read"):
            opened(tmp_path)
    assert not (tmp_path / "ran").exists()


def altered(case: str) -> dict[str, Any]:
    """Return members of a file of which one is not as nanoGPT writes it."""
    model, optimizer = stepped(Version())
    module, state = dict(model.state_dict()), optimizer.state_dict()
    arguments = {**SIZES, "bias": True, "dropout": 0.0}
    match case:
        case "another optimizer":
            state = torch.optim.AdamW(model.parameters()).state_dict()
        case "no step yet":
            state = optimizer_of(model, Version()).state_dict()
        case "a moment of another shape":
            state["state"][3]["exp_avg"] = torch.zeros(7)
        case "a number that is a tensor":
            state["param_groups"][0]["params"][1] = torch.arange(2)
        case "two steps":
            state["state"][3]["step"] = torch.tensor(2.0)
        case "a derived model":
            arguments["use_softermax"] = True
        case "other sizes":
            arguments["n_embd"] = 24
        case "impossible heads":
            arguments["n_head"] = 3
        case "a missing tensor":
            del module["transformer.h.1.mlp.c_fc.weight"]
        case "RMSNorm":
            module["transformer.h.1.ln_1.gain"] = module.pop("transformer.h.1.ln_1.weight")
        case "one bias less":
            del module["transformer.h.1.mlp.c_fc.bias"]
        case "no model of nanoGPT":
            module = {"layers.0.weight": torch.zeros(3)}
    return {"model": module, "optimizer": state, "model_args": arguments}


REFUSED = {
    "another optimizer": "It is not certain which moments belong to which parameter",
    "no step yet": "28 problems: number 0, transformer.wte.weight: no exp_avg and exp_avg_sq",
    "a moment of another shape": r"number 3, transformer.h.0.attn.c_proj.weight is \[20, 20\]",
    "a number that is a tensor": "numbers that are not in order",
    "two steps": r"several steps: \[1.0, 2.0\]",
    "a derived model": "use_softermax=True",
    "other sizes": "n_embd=24, the tensors have 20",
    "impossible heads": "n_head=3 of n_embd=20",
    "a missing tensor": "missing: transformer.h.1.mlp.c_fc.weight",
    "RMSNorm": "not of the model: transformer.h.1.ln_1.gain",
    "one bias less": "1 difference: missing: transformer.h.1.mlp.c_fc.bias",
    "no model of nanoGPT": "a matrix transformer.wte.weight",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_nanogpts_own_is_refused_by_name(tmp_path: Path, case: str) -> None:
    model, optimizer = stepped(Version())
    save(tmp_path / "ckpt.pt", model, optimizer, Version(), **altered(case))
    with pytest.raises((CheckpointError, MismatchError), match=REFUSED[case]):
        opened(tmp_path)


def test_a_pickle_of_nanogpt_is_read_only_if_trusted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trust-pickle"):
        read_source(tmp_path / "ckpt.pt", ImportOptions(compose([])))
