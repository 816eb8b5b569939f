"""What both families promise: the numbers of transformers under its names, padding, stages, precision."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.build import build_model
from models.config import Family, InitialKind, ModelConfig, Stage
from models.families import aliases, hf_config, initial_values, stored_tensors
from models.layers import Embedding, token_loss
from tests.unit.model_samples import (
    FAMILIES,
    VARIANTS,
    backward,
    fill,
    open_with_transformers,
    random_values,
    samples,
    save_as_transformers,
    stored_gradients,
)


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return request.param


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> ModelConfig:
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)


def test_logits_loss_and_gradients_equal_transformers(config: ModelConfig, tmp_path: Path) -> None:
    values = random_values(config)
    save_as_transformers(tmp_path, config, values)
    theirs = open_with_transformers(tmp_path)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = fill(build_model(config), load_file(tmp_path / "theirs" / "model.safetensors"))
    batch = samples(config)

    loss = backward(ours, batch)
    their_logits = theirs(batch[0]).logits
    their_loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), batch[1].flatten())
    their_loss.backward()

    # float32 sums in another order: a few units in the last place of logits of size 4, of gradients of size 1.
    with torch.no_grad():
        assert (ours(batch[0]) - their_logits).abs().max() <= 1e-5
    assert abs(loss - their_loss) <= 2e-6
    gradients = stored_gradients(ours)
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert list(gradients) == list(their_gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, their_gradients[name], atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_padded_vocabulary_changes_neither_loss_nor_gradients(config: ModelConfig) -> None:
    values, batch = random_values(config), samples(config)
    plain = fill(build_model(config), values)
    padded = fill(build_model(replace(config, pad_vocab_multiple=64)), values)
    losses = backward(plain, batch), backward(padded, batch)
    # The products over the vocabulary have other sizes, so their sums may run in another order.
    torch.testing.assert_close(losses[0], losses[1], atol=0, rtol=3e-7)
    gradients, padded_gradients = stored_gradients(plain), stored_gradients(padded)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, padded_gradients[name], atol=1e-6, rtol=1e-5)
    for name in {*stored_tensors(config), *aliases(config)}:
        parameter = dict(padded.named_parameters(remove_duplicate=False))[name]
        if parameter.shape[0] == 320:
            assert not parameter.grad[257:].any(), name


def test_two_stages_give_the_bits_of_the_whole_model(config: ModelConfig) -> None:
    values, tokens = random_values(config), samples(config)[0]
    whole = fill(build_model(config), values)
    front = fill(build_model(config, stage=Stage(range(1), first=True, last=False)), values)
    back = fill(build_model(config, stage=Stage(range(1, 3), first=False, last=True)), values)
    assert torch.equal(back(front(tokens)), whole(tokens))


def test_tied_weights_stay_one_after_materialising_from_meta(family: ModelConfig) -> None:
    config = replace(family, tie_word_embeddings=True)
    values, batch = random_values(config), samples(config)
    with torch.device("meta"):
        model = build_model(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    (alias, name) = next(iter(aliases(config).items()))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert parameters[alias] is parameters[name]
    assert parameters[alias].data_ptr() == parameters[name].data_ptr()
    assert list(dict(model.named_parameters())) == list(stored_tensors(config))
    assert torch.equal(fill(model, values)(batch[0]), fill(build_model(config), values)(batch[0]))


def test_activation_checkpointing_gives_the_same_gradient_bits(config: ModelConfig) -> None:
    config = replace(config, dropout=0.3 if config.family is Family.gpt2 else 0.0)
    model, batch = fill(build_model(config), random_values(config)), samples(config)
    loss = backward(model, batch, dropout_key=99)
    gradients = stored_gradients(model)
    model.activation_checkpointing = True
    assert torch.equal(backward(model, batch, dropout_key=99), loss)
    for name, gradient in stored_gradients(model).items():
        assert torch.equal(gradient, gradients[name]), name


def test_bfloat16_compute_with_float32_masters_is_near_float32(config: ModelConfig) -> None:
    values, batch = {name: value * 0.5 for name, value in random_values(config).items()}, samples(config)
    exact = backward(fill(build_model(config), values), batch)
    model = fill(build_model(config, compute_dtype=torch.bfloat16), values)
    assert model(batch[0]).dtype == torch.bfloat16
    loss = backward(model, batch)
    assert loss.dtype == torch.float32
    # bfloat16 has 8 bits of mantissa: 0.4 % a rounding, averaged over 118 tokens and bounded with room.
    assert abs(loss - exact) <= 0.02 * exact
    assert {gradient.dtype for gradient in stored_gradients(model).values()} == {torch.float32}
    assert all(gradient.isfinite().all() for gradient in stored_gradients(model).values())


def test_initial_values_follow_transformers(family: ModelConfig, tmp_path: Path) -> None:
    config = replace(family, n_embd=120, intermediate_size=480)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config)))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    for name, initial in initial_values(config).items():
        parameter = theirs.get_parameter(name)
        match initial.kind:
            case InitialKind.zeros:
                assert not parameter.any(), name
            case InitialKind.ones:
                assert (parameter == 1).all(), name
            case InitialKind.normal:
                # The smallest table has 4800 values, which give the standard deviation to 1 %: five times that.
                assert parameter.std().item() == pytest.approx(initial.scale, rel=0.05), name


def test_token_loss_is_float32_and_leaves_out_ignored_targets() -> None:
    logits, targets = torch.randn(2, 5, 7, dtype=torch.bfloat16), torch.randint(7, (2, 5))
    targets[1] = -100
    expected = -logits[0].float().log_softmax(-1).gather(-1, targets[0, :, None]).mean()
    loss = token_loss(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.ndim == 0
    # One sum of five float32 values, in any order.
    torch.testing.assert_close(loss, expected, atol=0, rtol=3e-7)


@pytest.mark.parametrize("dropout_key", [None, 2**63 + 1])
def test_blocks_compiled_singly_share_a_graph_and_keep_the_bits(family: ModelConfig, dropout_key: int | None) -> None:
    config = replace(family, n_layer=10, dropout=0.3 if family.family is Family.gpt2 else 0.0)
    values, batch = random_values(config), samples(config)
    model, compiled = fill(build_model(config), values), fill(build_model(config), values)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for block in compiled.blocks.values():
            block.compile(backend="aot_eager")
        losses = backward(model, batch, dropout_key), backward(compiled, batch, dropout_key)
    torch.compiler.reset()
    assert torch.equal(*losses)
    assert list(dict(compiled.named_parameters())) == list(stored_tensors(config))


def test_a_tied_table_has_the_gradient_of_both_its_ends(family: ModelConfig) -> None:
    config = replace(family, tie_word_embeddings=True)
    (alias, name) = next(iter(aliases(config).items()))
    values, batch = random_values(config), samples(config)
    tied, untied = fill(build_model(config), values), build_model(replace(config, tie_word_embeddings=False))
    fill(untied, {**values, alias: values[name]})
    backward(tied, batch)
    backward(untied, batch)
    gradient, ends = dict(tied.named_parameters())[name].grad, dict(untied.named_parameters())
    assert gradient is not None
    assert gradient.layout is torch.strided
    # The order in which rows of a token that occurs twice are summed differs.
    torch.testing.assert_close(gradient, ends[name].grad + ends[alias].grad, rtol=1e-5, atol=1e-7)


def test_a_tied_table_fuses_its_gradient_only_without_hooks(
    family: ModelConfig,
) -> None:
    config = replace(family, tie_word_embeddings=True)
    values, (windows, _) = random_values(config), samples(config)
    model = fill(build_model(config), values)
    logits = model(windows)
    (embedding,) = (module for module in model.modules() if isinstance(module, Embedding))
    called: list[nn.Module] = []
    handle = embedding.register_forward_hook(lambda module, *_: called.append(module))
    assert torch.equal(model(windows), logits)
    assert called == [embedding]
    handle.remove()
    model.lm_head.weight = nn.Parameter(2 * embedding.weight.detach())
    torch.testing.assert_close(model(windows), 2 * logits)
