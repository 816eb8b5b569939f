"""The text of an error: one paragraph of sentences."""

from __future__ import annotations

import pytest

from reprise.errors import TrainerError, count_of


@pytest.mark.parametrize("part", ["what", "expected", "found"])
def test_an_error_inside_an_error_ends_its_sentence_once(part: str) -> None:
    inner = TrainerError("A file is damaged", where="f", found="a hole", fix="It cannot be trusted.")
    parts = {"what": "Nothing is left", part: str(inner)}
    assert str(TrainerError(**parts, fix="Mend one.")).endswith(" It cannot be trusted. Mend one.")
    assert str(TrainerError("Nothing is left", found="nothing", fix="\nMend one.")).endswith(
        "found nothing.\nMend one."
    )


def test_a_number_has_the_noun_of_its_count() -> None:
    assert [count_of(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [count_of(number, "branch", "es", form=",") for number in (1, 1000)] == ["1 branch", "1,000 branches"]
