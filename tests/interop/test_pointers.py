"""A Git LFS pointer in place of a tensor file is called that, whatever reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.commands import convert
from trainer.interop.pointers import refuse_pointers

POINTER = b"""version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 548105171
"""


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("hf", "model-00001-of-00002.safetensors"),
        ("dcp", "__0_0.distcp"),
        ("deepspeed", "mp_rank_00_model_states.pt"),
        ("nanogpt", ""),
        ("llmc", ""),
    ],
)
def test_every_import_names_a_pointer(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, name: str) -> None:
    source = tmp_path / "source"
    if name:
        source.mkdir()
    (source / name if name else source).write_bytes(POINTER)
    assert convert.main(["import", form, str(source), str(tmp_path / "out")]) == 2
    text = capsys.readouterr().err
    assert "is a Git LFS pointer" in text
    assert f"found {name or 'source'}." in text
    assert not (tmp_path / "out").exists()


def test_other_small_files_pass(tmp_path: Path) -> None:
    for name, content in (("a", b""), ("b", POINTER[1:]), ("c", POINTER + bytes(2000))):
        (tmp_path / name).write_bytes(content)
    refuse_pointers(tmp_path)
