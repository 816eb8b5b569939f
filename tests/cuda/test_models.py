"""The models on a device: against transformers in float32 and bfloat16, and compiled against eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

from models.build import build_model
from models.config import ModelConfig
from models.families import aliases, hf_config, stored_tensors
from models.layers import Dropout, Site, token_loss
from models.network import Model
from tests.cuda.devices import NOT_SIMULATED
from tests.harness import compose
from tests.unit.model_samples import FAMILIES

# The kernels of a simulated device are a CPU's, and it has no autocast.
pytestmark = pytest.mark.parametrize("device", NOT_SIMULATED, indirect=True)

# The sizes of a device, and its families: those of the published models, with few layers where there are many.
REAL = {
    "gpt2": ["model=gpt2_124m"],
    "llama3": ["model=llama3_1b", "model.n_layer=2"],
    "qwen3": ["model=qwen3_0.6b", "model.n_layer=4"],
}
# Sums in another order. float32 products keep 24 bits on a CUDA device too: torch leaves TF32 off.
FLOAT32_ERROR = 1e-5
# One rounding to bfloat16 is 2^-9, and many meet in a logit. Ours rounds the sums along the residual connections too,
# which autocast keeps in float32: 1.46 times its error at GPT-2 124M, 1.25 times at 2 layers of LLaMA-3 1B (on a CPU).
BFLOAT16_ERROR, MOST_OF_THEIRS = 3e-2, 2.0


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.manual_seed(1234)
    assert torch.get_float32_matmul_precision() == "highest"


def config_of(family: str, device: torch.device) -> ModelConfig:
    """Return a small model of odd sizes on a CPU, and the published one on a device."""
    return compose(REAL[family]).model if device.type == "cuda" else FAMILIES[family]


def their_model(config: ModelConfig, device: torch.device) -> nn.Module:
    """Return transformers' model in training mode, with random values."""
    table = dict(hf_config(config))
    found = AutoConfig.for_model(table.pop("model_type"), **table)
    model: nn.Module = AutoModelForCausalLM.from_config(found, attn_implementation="sdpa").float()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, so that a swapped one shows
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.to(device).train()


def our_model(config: ModelConfig, values: nn.Module, device: torch.device, dtype: torch.dtype) -> Model:
    """Return our model with the parameters of theirs."""
    model = build_model(config, compute_dtype=dtype).to(device)
    given, names, stored = dict(values.named_parameters()), aliases(config), stored_tensors(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = names.get(name, name)
            view = stored[name].view
            parameter.zero_()
            parameter[tuple(slice(n) for n in view)] = given[name].view(view)
    return model


def batch(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, two of which are left out."""
    rows, length = (2, 1024) if device.type == "cuda" else (2, 40)
    tokens = torch.randint(config.vocab_size, (rows, length + 1), device=device)
    targets = tokens[:, 1:].clone()
    targets[0, :2] = -100
    return tokens[:, :-1], targets


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    """Return all gradients in stored form as one vector, of a model of ours or of theirs."""
    loss.backward()
    found = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        if isinstance(model, Model):
            gradient = gradient[tuple(slice(n) for n in stored_tensors(model.config)[name].view)]
        found.append(gradient.flatten().double().cpu())
    return torch.cat(found)


def distance(found: Tensor, reference: Tensor) -> float:
    """Return the relative distance of two tensors: the norm of the difference over that of the reference."""
    return float((found.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("family", REAL)
def test_float32_logits_and_gradients_are_theirs(device: torch.device, family: str) -> None:
    config = config_of(family, device)
    theirs = their_model(config, device)
    ours = our_model(config, theirs, device, torch.float32)
    tokens, targets = batch(config, device)

    logits, their_logits = ours(tokens), theirs(tokens).logits
    found = distance(logits.detach()[..., : config.vocab_size], their_logits.detach())
    assert found <= FLOAT32_ERROR
    loss, their_loss = token_loss(logits, targets), token_loss(their_logits, targets)
    assert loss.item() == pytest.approx(their_loss.item(), rel=FLOAT32_ERROR)
    assert distance(gradients(ours, loss), gradients(theirs, their_loss)) <= 10 * FLOAT32_ERROR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_compiled_blocks_give_eager_numbers(device: torch.device, family: str, dtype: torch.dtype) -> None:
    """On a CPU the backend only differentiates the graphs, for the sake of time."""
    config = config_of(family, device)
    theirs = their_model(config, device)
    eager, compiled = (our_model(config, theirs, device, dtype) for _ in range(2))
    del theirs
    for block in compiled.blocks.values():
        block.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    tokens, targets = batch(config, device)
    logits = [model(tokens)[..., : config.vocab_size] for model in (eager, compiled)]
    most = FLOAT32_ERROR if dtype is torch.float32 else BFLOAT16_ERROR
    assert distance(logits[1].detach(), logits[0].detach()) <= most
    found = [gradients(model, token_loss(out, targets)) for model, out in zip((eager, compiled), logits, strict=True)]
    assert distance(found[1], found[0]) <= 10 * most


@pytest.mark.parametrize("family", REAL)
def test_bfloat16_errs_about_as_much_as_theirs(device: torch.device, family: str) -> None:
    """The reference is float32; theirs runs under autocast, and ours takes SDPA's flash path alone."""
    config = config_of(family, device)
    theirs = their_model(config, device)
    tokens, targets = batch(config, device)
    with torch.no_grad():
        reference = theirs(tokens).logits
        with torch.autocast(device.type, torch.bfloat16):
            their_error = distance(theirs(tokens).logits, reference)
    ours = our_model(config, theirs, device, torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        logits = ours(tokens)
        found = distance(logits.detach()[..., : config.vocab_size], reference)
        assert found <= min(BFLOAT16_ERROR, MOST_OF_THEIRS * their_error), their_error
        gradient = gradients(ours, token_loss(logits, targets))
    assert distance(gradient, gradients(theirs, token_loss(theirs(tokens).logits, targets))) <= 2 * BFLOAT16_ERROR


def test_the_mask_of_dropout_depends_on_its_key_alone(device: torch.device) -> None:
    dropout, x = Dropout(0.5, Site.embedding, layer=1), torch.ones(1000, device=device)
    key = 2**63 + 5
    first = dropout(x, key)
    torch.rand(17, device=device)
    assert torch.equal(dropout(x, key), first)
    assert not torch.equal(dropout(x, key + 1), first)
    assert 300 < int((first == 0).sum()) < 700
