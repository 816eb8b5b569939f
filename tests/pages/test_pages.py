"""Every block of code in the documents does what its page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.pages.page import PageRunner
from tests.pages.preparations import PAGES, SMALL, Page

# It needs a server.
NOT_RUN_AT_ALL = {"trackers.md"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a text of its user's own."""
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("design.md", "reliability.md"))
    (tmp_path / "mytext.txt").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(folder: Path, page: Page) -> None:
    for package in page.packages:
        pytest.importorskip(package)
    if page.prepare:
        page.prepare(folder)
    assert PageRunner(folder, SMALL | page.small, page.names).run(ROOT / "docs" / page.name) == page.blocks


@pytest.mark.nightly
def test_the_cells_of_the_notebook_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    assert PageRunner(folder).run_notebook(ROOT / "examples" / "first_run.ipynb") == 5


def test_every_page_with_commands_is_run() -> None:
    names = {
        path.name
        for path in (ROOT / "docs").glob("*.md")
        if re.search(r"^ *```(sh|console)$", path.read_text(encoding="utf-8"), re.M)
    }
    assert names - {page.name for page in PAGES} == NOT_RUN_AT_ALL


def test_a_block_that_fails_or_says_another_thing_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\necho 3 apples in 2.5 s\n```\n```text\n3 apples in 7 s\n```\n", encoding="utf-8")
    assert PageRunner(tmp_path).run(page) == 2
    page.write_text("```sh\necho 3 apples\n```\n```text\n4 apples\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"page\.md:4: '4 apples' is missing in\n3 apples"):
        PageRunner(tmp_path).run(page)
    page.write_text("```sh\nfalse\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"page\.md:1: status 1"):
        PageRunner(tmp_path).run(page)
    page.write_text("```sh\n# not run: two hosts\nfalse\n```\n", encoding="utf-8")
    assert PageRunner(tmp_path).run(page) == 0
