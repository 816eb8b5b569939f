"""Dropout masks are functions of key, site, layer and shard."""

from dataclasses import replace

import pytest
import torch

from models.build import build_model
from models.layers import Dropout, Site, seed_site, site_seed, splitmix64
from tests.unit.model_samples import GPT2, fill, random_values, samples


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)


def test_the_generator_of_the_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = [torch.Generator() for _ in range(2)]
    monkeypatch.setattr(torch.xpu, "default_generators", generators)
    before = generators[0].initial_seed(), torch.initial_seed()
    seed_site(7, Site.embedding, layer=3, shard=0, device=torch.device("xpu", 1))
    assert generators[1].initial_seed() == site_seed(7, Site.embedding, layer=3)
    assert (generators[0].initial_seed(), torch.initial_seed()) == before


def test_a_dropout_key_decides_every_mask() -> None:
    config = replace(GPT2, dropout=0.3)
    model, tokens = fill(build_model(config), random_values(config)), samples(config)[0]
    first = model(tokens, dropout_key=2**63 + 5)
    torch.rand(17)
    assert torch.equal(model(tokens, dropout_key=2**63 + 5), first)
    assert not torch.equal(model(tokens, dropout_key=2**63 + 6), first)
    small = model(tokens, dropout_key=5)
    assert torch.equal(model(tokens, dropout_key=torch.tensor([5])), small)


def test_without_a_key_nothing_is_dropped_or_drawn() -> None:
    config = replace(GPT2, dropout=0.3)
    values, tokens = random_values(config), samples(config)[0]
    generator = torch.get_rng_state()
    dropping = fill(build_model(config), values)(tokens)
    assert torch.equal(dropping, fill(build_model(GPT2), values)(tokens, dropout_key=3))
    assert torch.equal(torch.get_rng_state(), generator)


def test_site_seeds_are_pinned_and_differ_everywhere() -> None:
    # splitmix64 of state 0 begins with this value in every published implementation.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert site_seed(0, Site.embedding, layer=0) == 0xCD7F3A87B5BB05BE
    seeds = {
        site_seed(key, site, layer=layer, shard=shard)
        for key in range(8)
        for site in Site
        for layer in range(8)
        for shard in range(4)
    }
    assert len(seeds) == 8 * len(Site) * 8 * 4
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert site_seed(-1, Site.attention, layer=0) == site_seed(2**64 - 1, Site.attention, layer=0)


def test_a_shard_draws_its_own_mask() -> None:
    site, x = Dropout(0.5, Site.attention_residual, layer=1), torch.ones(64)
    first = site(x, 3)
    site.shard = 1
    assert not torch.equal(site(x, 3), first)
    site.shard = 0
    assert torch.equal(site(x, 3), first)
