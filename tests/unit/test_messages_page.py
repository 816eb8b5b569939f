"""The page of messages gives back what was written to it, and what differs between runs is not on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import messages
from tests.messages import page_of, read, refused, steady

NAMES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1)
TEXTS = st.lists(st.from_regex(r"[A-Za-z(][\w .=/(),'#-]*(\n  [\w.=:-]+)*", fullmatch=True))


@given(st.dictionaries(NAMES, TEXTS))
def test_a_page_is_read_as_it_was_written(texts: dict[str, list[str]]) -> None:
    assert read(page_of(texts)) == texts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{folder}/a/b.json: bad", "TMP/a/b.json: bad"),
        ("file://{folder}", "TMP"),
        ("of 2026-11-28 10:00:01", "of DATE"),
        ("pid 31 on host node-7.cluster", "pid PID on host HOST"),
        ("digest 00ff12ab34", "digest HEX"),
        ("loss 2.12345e-07 above 1.5", "loss NUMBER above 1.5"),
        ("iter_0000010 has train.seed=12  \n", "iter_0000010 has train.seed=12"),
    ],
)
def test_what_differs_between_runs_is_left_out(tmp_path: Path, text: str, expected: str) -> None:
    assert steady(text.replace("{folder}", str(tmp_path))) == expected


def test_other_words_and_a_name_left_out_are_noticed(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.delenv(messages.WRITTEN, raising=False)
    monkeypatch.setattr(messages, "_page", lambda: {request.node.nodeid: ["A key is wrong (a.b)", "Two", "Three"]})
    with refused(ValueError, "a.b"):
        raise ValueError("A key is wrong (a.b)")
    for name, text in (("", "2"), ("c.d", "Three"), ("", "Four")):
        with pytest.raises(AssertionError), refused(ValueError, name):
            raise ValueError(text)
