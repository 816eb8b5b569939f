"""The reader in docs/, which needs nothing of ours, reads our checkpoints and refuses damaged ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from reprise import save
from tests import ROOT
from tests.fakes import SHARDINGS, Sharding, bits, sample_specs, sample_state, save_sample
from trainer.commands import checkpoint as look

READER = ROOT / "docs" / "read_checkpoint.py"
DOCUMENT = (ROOT / "docs" / "generated" / "format.md").read_text(encoding="utf-8")

Reader = Callable[[Path], tuple[dict[str, Any], dict[str, np.ndarray]]]


@pytest.fixture(scope="module")
def read() -> Reader:
    """Return the reader; it runs without any name of ours."""
    names: dict[str, Any] = {"__name__": "read_checkpoint"}
    exec(compile(READER.read_text(), str(READER), "exec"), names)  # noqa: S102 - our own document
    found: Reader = names["read_checkpoint"]
    return found


def saved(folder: Path, sharding: Sharding = SHARDINGS[1]) -> Path:
    """Save the sample state, cut as `sharding` says, and return the checkpoint."""
    return save_sample(folder, sharding, 3, aliases={"tied": "embedding"})


@pytest.mark.parametrize("sharding", [SHARDINGS[0], SHARDINGS[1], SHARDINGS[8]], ids=lambda s: s.name)
def test_the_reader_reads_every_tensor(tmp_path: Path, read: Reader, sharding: Sharding) -> None:
    path = saved(tmp_path, sharding)
    state, tensors = read(path)
    expected = sample_state(sample_specs(), seed=7)
    assert state["iteration"] == 3
    assert tensors.keys() == {*expected, "tied"}
    for name, value in expected.items():
        assert tensors[name].shape == tuple(value.shape)
        assert tensors[name].tobytes() == bits(value)
    entries = json.loads((path / "manifest.json").read_bytes())["tensors"]
    assert any("shares" in entry for entry in entries.values()) == (sharding.world_size > 1)


def test_the_reader_refuses_damaged_and_missing_files(tmp_path: Path, read: Reader) -> None:
    path = saved(tmp_path)
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        whole = file.read_bytes()
        for at in {0, 8, 20, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(ValueError, match=r"damaged|disagree"):
                read(path)
        file.write_bytes(whole[:-1])
        with pytest.raises(ValueError, match=r"."):
            read(path)
        file.unlink()
        with pytest.raises(FileNotFoundError):
            read(path)
        file.write_bytes(whole)
    read(path)


def test_the_reader_needs_nothing_of_ours() -> None:
    imports = set(re.findall(r"^(?:import|from) (\w+)", READER.read_text(), flags=re.MULTILINE))
    assert imports - {"itertools", "json", "math", "pathlib", "stat", "sys"} == {"numpy", "xxhash"}


def digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def reseal(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the text of a manifest, and give it the digest that then is right."""
    body = change((path / "manifest.json").read_bytes()[:-31])
    (path / "manifest.json").write_bytes(body + f',"xxh3_64":"{digest(body)}"}}\n'.encode())


def rewrite(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file that holds no tensors, and give the manifest the size and the digest that then are right."""
    old = (path / name).read_bytes()
    new = change(old)
    (path / name).write_bytes(new)
    entry = '"%s":{"bytes":%d,"xxh3_64":"%s"}'
    before, after = (entry % (name, len(data), digest(data)) for data in (old, new))
    reseal(path, lambda text: text.replace(before.encode(), after.encode()))


def link(file: Path) -> None:
    """Put a file or a folder elsewhere, and a link to it in its place."""
    file.rename(file.parents[1] / f"moved {file.name}")
    file.symlink_to(file.parents[1] / f"moved {file.name}")


def doubled(key: bytes) -> Callable[[bytes], bytes]:
    return lambda text: text.replace(b"{", b'{"%s": 7, ' % key, 1)


def inside(replaced: str, by: str) -> Callable[[bytes], bytes]:
    return lambda text: text.replace(replaced.encode(), by.encode())


STATE = "trainer_state.json"
HOSTILE: dict[str, Callable[[Path], object]] = {
    "another format of the state": lambda path: rewrite(path, STATE, inside("reprise/1", "reprise/2")),
    "another format of the manifest": lambda path: reseal(path, inside("manifest/1", "manifest/2")),
    "a file that is a link": lambda path: link(path / "model.safetensors"),
    "a folder that is a link": lambda path: link(path / "optimizer"),
    "a manifest that is a link": lambda path: link(path / "manifest.json"),
    "a path out of the folder": lambda path: reseal(path, inside(f'"{STATE}"', f'"../{path.name}/{STATE}"')),
    "a path with a dot": lambda path: reseal(path, inside(f'"{STATE}"', f'"./{STATE}"')),
    "an absolute path": lambda path: reseal(path, inside(f'"{STATE}"', f'"{path}/{STATE}"')),
    "a key twice in the manifest": lambda path: reseal(path, doubled(b"format")),
    "a key twice in the state": lambda path: rewrite(path, STATE, doubled(b"iteration")),
    "NaN in the state": lambda path: rewrite(path, STATE, inside('"iteration": 3', '"iteration": NaN')),
    "no state": lambda path: reseal(path, lambda text: re.sub(rb',"trainer_state.json":{[^}]*}', b"", text)),
    "other blocks": lambda path: reseal(path, inside('"block_bytes":4194304', '"block_bytes":4194305')),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_the_reader_refuses_what_verify_refuses(tmp_path: Path, read: Reader, case: str) -> None:
    path = saved(tmp_path)
    assert look.main(["verify", str(path)]) == 0
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    HOSTILE[case](path)
    assert {file: file.read_bytes() for file in before} != before or any(file.is_symlink() for file in path.iterdir())
    assert look.main(["verify", str(path)]) != 0
    with pytest.raises(ValueError, match=r"."):
        read(path)


def test_the_worked_example_is_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        model.bias.copy_(torch.tensor([0.5, -0.5]))
    path = save("example", model, iteration=7)
    data = (path / "model.safetensors").read_bytes()
    section = DOCUMENT.partition("## A worked example")[2]
    header, tensors, manifest = re.findall(r"^```text\n(.*?)\n```", section, flags=re.MULTILINE | re.DOTALL)
    length = bytes.fromhex(section.partition("The first 8 are `")[2][:23])
    assert data == length + header.encode().ljust(int.from_bytes(length, "little")) + bytes.fromhex(tensors)
    ours, theirs = json.loads((path / "manifest.json").read_bytes()), json.loads(manifest)
    changing = ("attempt", "xxh3_64")
    assert {k: v for k, v in ours.items() if k not in changing} == {
        k: v for k, v in theirs.items() if k not in changing
    }
