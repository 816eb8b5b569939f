"""Hostile checkpoints of other programs: refused in one message, within memory and time that their size bounds."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.interop.fuzz_importers import Target, fuzz, run_case, targets
from tests.interop.hostile_files import bomb, call, nested, number, payloads, rewrite_pickle, shared_lists, with_value

Edit = Callable[[Path, Path], str]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Target]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has no others
    yield targets(tmp_path_factory.mktemp("seeds"))
    torch.set_num_threads(threads)


def in_pickle(name: str, key: str, payload: bytes) -> Edit:
    """Return a change that adds an entry to the first file of a name."""

    def edit(copy: Path, canary: Path) -> str:
        path = next(copy.rglob(name))
        path.write_bytes(rewrite_pickle(path.read_bytes(), lambda data: with_value(data, key, payload)))
        return name

    return edit


def with_argument(name: str, argument: str, value: object) -> Edit:
    """Return a change of an argument of the program in every file of a name."""

    def edit(copy: Path, canary: Path) -> str:
        for path in copy.rglob(name):
            table = torch.load(path, weights_only=False)
            if "args" in table:
                setattr(table["args"], argument, value)
            torch.save(table, path)
        return name

    return edit


def packed(name: str, member: str) -> Edit:
    """Return a change that makes a file one that unpacks to 400 MB."""

    def edit(copy: Path, canary: Path) -> str:
        path = next(copy.rglob(name))
        path.write_bytes(bomb(path.read_bytes(), member, 400 << 20))
        return name

    return edit


def without(*names: str) -> Edit:
    """Return a change that removes files, and the optimizer's entry beside the model."""

    def edit(copy: Path, canary: Path) -> str:
        for name in names:
            for path in list(copy.rglob(name)):
                path.unlink()
                if not any(path.parent.iterdir()):
                    path.parent.rmdir()
        for path in copy.rglob("model*rng.pt"):
            table = torch.load(path, weights_only=False)
            table["optimizer"] = None
            torch.save(table, path)
        return "removed"

    return edit


def moved_list(copy: Path, canary: Path) -> str:
    """Let the list of members of each archive begin behind its place, so that members begin before the file."""
    for path in copy.rglob("*.distcp"):
        data = bytearray(path.read_bytes())
        at = data.find(b"PK\6\6")
        while at >= 0:
            (begin,) = struct.unpack_from("<Q", data, at + 48)
            struct.pack_into("<Q", data, at + 48, begin + 100_000)
            at = data.find(b"PK\6\6", at + 1)
        path.write_bytes(data)
    return "list"


def long_tag(copy: Path, canary: Path) -> str:
    """Let the newest tag be longer than a name can be."""
    (copy / "latest").write_text("9" * 5000)
    return "tag"


def long_name(copy: Path, canary: Path) -> str:
    """Let DCP's metadata name a file that no file system could have."""
    path = next(copy.rglob(".metadata"))
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - written a moment ago
    for info in metadata.storage_data.values():
        info.relative_path = "a" * 100_000
    path.write_bytes(pickle.dumps(metadata))
    return "name"


CASES: dict[str, tuple[str, Edit]] = {
    "bytes of a bytearray": ("legacy coalesced", in_pickle("distrib_optim.pt", "a", payloads(Path())["bytearray"]())),
    "a text of 2 ** 40": ("legacy coalesced", in_pickle("model_optim_rng.pt", "a", payloads(Path())["text"]())),
    "values within values": ("legacy coalesced", in_pickle("model_optim_rng.pt", "model", shared_lists(40))),
    "a key of 2 ** 40": ("torch_dist buckets", in_pickle("common.pt", "a", b"}" + nested(40) + b"Ns")),
    "an iteration of 2 ** 28": ("torch_dist buckets", in_pickle("common.pt", "iteration", nested(28))),
    "layers of the buckets": ("torch_dist buckets", with_argument("common.pt", "num_layers", 10**9)),
    "layers of a rank": ("legacy coalesced", with_argument("model_optim_rng.pt", "num_layers", 10**9)),
    "ranks": ("legacy coalesced", with_argument("model_optim_rng.pt", "tensor_model_parallel_size", 10**9)),
    "ranks of DeepSpeed": (
        "megatron-deepspeed",
        with_argument("*model_states.pt", "pipeline_model_parallel_size", 10**9),
    ),
    "a packed pickle": ("nanogpt", packed("ckpt.pt", "data.pkl")),
    "a chunk's list of members": ("torch_dist fully", moved_list),
    "a nested step": ("nanogpt", in_pickle("ckpt.pt", "iter_num", nested(28))),
    "a long name": ("torch_dist plain", long_name),
    "a long tag": ("deepspeed 2", long_tag),
    "a call": ("deepspeed 2", in_pickle("*optim_states.pt", "a", call("os", "system", number(1)))),
}
# Nothing is allocated: the class is not admitted, and its content is discarded.
ALLOWED = {"bytes of a bytearray"}


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_file_is_refused_within_bounds(found: dict[str, Target], tmp_path: Path, case: str) -> None:
    name, edit = CASES[case]
    result = run_case(name, found[name], edit, tmp_path / "case")
    assert (result.outcome, result.problem) == ("imported" if case in ALLOWED else "refused", None)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("legacy coalesced", without("distrib_optim.pt")),
        ("legacy data ranks", without("optim.pt")),
        ("deepspeed 0", in_pickle("mp_rank_00_model_states.pt", "optimizer", b"N")),
    ],
)
def test_an_import_without_moments_is_asked_for(
    found: dict[str, Target], tmp_path: Path, name: str, edit: Edit
) -> None:
    result = run_case(name, found[name], edit, tmp_path / "case")
    assert (result.outcome, result.problem) == ("refused", None)
    assert "--weights-only" in (tmp_path / "case/output").read_text()
    alone = replace(found[name], overrides=(*found[name].overrides, "--weights-only"), has_moments=False)
    assert run_case(name, alone, edit, tmp_path / "case").outcome == "imported"


@pytest.mark.slow
def test_damaged_checkpoints_are_refused_or_imported(found: dict[str, Target], tmp_path: Path) -> None:
    problems = [(n, r) for n, r in fuzz(found, 1, range(40), tmp_path / "case") if r.problem is not None]
    assert problems == []


@pytest.mark.nightly
def test_two_thousand_damaged_checkpoints(found: dict[str, Target], tmp_path: Path) -> None:
    problems = [(n, r) for n, r in fuzz(found, 2, range(2000), tmp_path / "case") if r.problem is not None]
    assert problems == []
