"""The stored names of a nested state dict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.format.layout import TensorKind
from reprise.nested.stored_names import keys_of, keys_of_pointer, natural, pointer, stored_name

# Keys that mean something to the rules, and any others.
KEY = st.sampled_from(["model", "optimizer", "state", "exp_avg", "a.b", "", "/", "/model/a", "~1"]) | st.text(
    max_size=4
)
KEYS = st.lists(KEY, min_size=1, max_size=5).map(tuple)


@pytest.mark.parametrize(
    ("keys", "kind", "name"),
    [
        (("model", "layers.0.weight"), TensorKind.MODEL, "layers.0.weight"),
        (("model", "deep", "w"), TensorKind.EXTRA, "/model/deep/w"),
        (("model", "/w"), TensorKind.EXTRA, "/model/~1w"),
        (("optimizer", "state", "layers.0.weight", "exp_avg"), TensorKind.OPTIMIZER, "exp_avg.layers.0.weight"),
        (("optimizer", "state", "w", "a.b"), TensorKind.EXTRA, "/optimizer/state/w/a.b"),
        (("a/b~c", ""), TensorKind.EXTRA, "/a~1b~0c/"),
    ],
)
def test_weights_and_optimizer_state_have_the_names_of_save(keys: tuple[str, ...], kind: TensorKind, name: str) -> None:
    assert stored_name(keys) == (kind, name)
    assert keys_of(kind, name) == keys


@given(KEYS)
def test_a_name_leads_back_to_its_keys(keys: tuple[str, ...]) -> None:
    assert keys_of_pointer(pointer(keys)) == keys
    assert keys_of(*stored_name(keys)) == keys


def test_digits_are_compared_as_numbers() -> None:
    names = ["norm", "layers.10.w", "layers.x", "layers.010.w", "layers.9.w"]
    assert sorted(names, key=lambda name: (natural(name), name)) == [
        "layers.9.w",
        "layers.010.w",
        "layers.10.w",
        "layers.x",
        "norm",
    ]
    natural("9" * 10_000)
