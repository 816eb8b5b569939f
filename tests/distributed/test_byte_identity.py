"""One state, saved from any number of ranks at any ZeRO stage, is the same files byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import TINY, run_ok, tensor_files

FAMILIES = {
    "gpt2": ["model=gpt2_tiny"],
    "llama3": ["model=llama3_tiny"],
    "llama3-tied": ["model=llama3_tiny", "model.tie_word_embeddings=true"],
}
MANY_FILES = "checkpoint.file_bytes=8192"
LAST = "checkpoints/iter_0000003"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return, for each family, the folder of a run of three iterations on one rank."""
    folder = tmp_path_factory.mktemp("trained")
    for name, family in FAMILIES.items():
        run_ok(folder / name, [*family, *TINY, "train.train_iters=3"])
    return {name: folder / name for name in FAMILIES}


def save_again(source: Path, folder: Path, family: str, *extra: str, ranks: int, zero_stage: int) -> dict[str, bytes]:
    """Load the final state of `source` on other ranks, save it in `folder`, and return the files."""
    overrides = [*FAMILIES[family], *TINY, "train.train_iters=3", f"parallel.zero_stage={zero_stage}", *extra]
    ended = run_ok(
        folder, [*overrides, f"checkpoint.load={source / 'checkpoints'}", "checkpoint.reshard=true"], ranks=ranks
    )
    assert "iteration 3 from" in ended.outputs[0]
    return tensor_files(folder / LAST)


def test_the_sizes_are_odd(trained: dict[str, Path]) -> None:
    config = json.loads((trained["gpt2"] / LAST / "config.json").read_text())
    assert config["vocab_size"] == 257
    assert config["n_embd"] % 3
    assert config["n_inner"] % 3


@pytest.mark.parametrize(
    ("family", "ranks", "zero_stage"),
    [
        ("gpt2", 1, 3),
        *[("gpt2", ranks, zero_stage) for ranks in (2, 3) for zero_stage in range(4)],
        ("llama3", 2, 1),
        ("llama3", 3, 0),
        ("llama3", 3, 3),
        ("llama3-tied", 2, 3),
    ],
)
def test_saved_from_other_ranks_it_is_byte_identical(
    trained: dict[str, Path], tmp_path: Path, family: str, ranks: int, zero_stage: int
) -> None:
    expected = tensor_files(trained[family] / LAST)
    assert len(expected) == 2
    found = save_again(trained[family], tmp_path / "again", family, ranks=ranks, zero_stage=zero_stage)
    assert found == expected


def test_many_small_files_are_byte_identical(trained: dict[str, Path], tmp_path: Path) -> None:
    source = trained["gpt2"]
    one = save_again(source, tmp_path / "one", "gpt2", MANY_FILES, ranks=1, zero_stage=1)
    assert sum(name.startswith("model-") for name in one) > 3
    assert sum(name.startswith("optimizer/") for name in one) > 6
    assert save_again(source, tmp_path / "two", "gpt2", MANY_FILES, ranks=2, zero_stage=2) == one
    assert save_again(source, tmp_path / "three", "gpt2", MANY_FILES, ranks=3, zero_stage=3) == one
    # From many files back to few.
    back = save_again(tmp_path / "three", tmp_path / "back", "gpt2", ranks=2, zero_stage=0)
    assert back == tensor_files(source / LAST)


def test_a_chain_of_topologies_comes_back_to_the_same_bytes(trained: dict[str, Path], tmp_path: Path) -> None:
    source = trained["gpt2"]
    expected = tensor_files(source / LAST)
    for number, (ranks, zero_stage) in enumerate([(3, 3), (2, 0), (1, 1)]):
        folder = tmp_path / f"link{number}"
        assert save_again(source, folder, "gpt2", ranks=ranks, zero_stage=zero_stage) == expected
        source = folder


def test_padding_rows_of_the_vocabulary_are_not_in_the_files(trained: dict[str, Path], tmp_path: Path) -> None:
    source = trained["gpt2"]
    pad = "model.pad_vocab_multiple=64"
    found = save_again(source, tmp_path / "padded", "gpt2", pad, ranks=3, zero_stage=3)
    assert found == tensor_files(source / LAST)
    # And from padded memory into memory without padding.
    back = save_again(tmp_path / "padded", tmp_path / "back", "gpt2", ranks=1, zero_stage=1)
    assert back == found
