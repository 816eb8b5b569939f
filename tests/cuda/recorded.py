"""Findings of the tests on a device that no test asserts: the end of a run prints them."""

from __future__ import annotations

FOUND: dict[str, str] = {}


def record(name: str, value: str) -> None:
    """Keep a finding."""
    FOUND[name] = value
