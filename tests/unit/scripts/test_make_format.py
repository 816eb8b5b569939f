"""docs/generated/format.md says of tensors, state and values what the code does."""

from __future__ import annotations

from models.families import FAMILIES
from scripts import make_format
from trainer.record.resume_rules import RULES


def test_the_page_is_that_of_the_code() -> None:
    page = make_format.OUTPUT.read_text(encoding="utf-8")
    assert page == make_format.page(), "`python -m scripts.make_format` writes it anew"


def test_the_page_has_every_family_and_every_member_with_a_rule() -> None:
    page = make_format.page()
    assert page.count("| `lm_head.weight` |") == len(FAMILIES)
    members = {rule.field.partition(".")[0] for rule in RULES} - {"base"}
    assert {member for member in members if f'"{member}": ' not in page} == set()
