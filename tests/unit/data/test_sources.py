"""The files of a corpus: whatever a pattern matches that is no file is refused by name."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from reprise.errors import DataError
from tests.messages import refused
from tests.unit.data.test_corpus import write_texts
from trainer.data.sources import find_files, stdlib_sources


def test_a_match_that_gives_nothing_is_refused_by_name(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    write_texts(texts, 3)
    (texts / "folder").mkdir()
    (texts / "link").symlink_to("000.txt")
    assert len(find_files(f"{texts}/*")) == 4
    for pattern in (f"{texts}/nothing-*.txt", "/dev/null", str(texts)):
        with refused(DataError, pattern):
            find_files(pattern)
    odd = texts / "odd"
    for make in (lambda: odd.symlink_to("gone"), lambda: odd.symlink_to("odd"), lambda: os.mkfifo(odd)):
        make()
        for pattern in (f"{texts}/*", f"{texts}/odd"):
            with refused(DataError, f"{odd}"):
                find_files(pattern)
        odd.unlink()


def test_stdlib_leaves_out_packages_and_tests(tmp_path: Path) -> None:
    names = [source.name for source in stdlib_sources(Path(sysconfig.get_paths()["stdlib"]))]
    assert names == sorted(set(names))
    with refused(DataError, "*.py"):
        stdlib_sources(tmp_path)
    kept = ["a.py", "json/b.py", "testing.py"]
    left = ["site-packages/c.py", "dist-packages/d.py", "test/e.py", "json/tests/f.py", "idlelib/g.py", "lib2to3/h.py"]
    left += ["__pycache__/i.py", "_sysconfigdata__linux.py", "json/j.txt", "sitecustomize.py"]
    for name in kept + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [source.name for source in stdlib_sources(tmp_path)] == kept
