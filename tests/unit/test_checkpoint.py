"""Programs that import the library under its former names get the same objects, and a warning."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

import reprise
import reprise.errors


@pytest.mark.parametrize(
    ("former", "module", "names"),
    [
        ("trainer.checkpoint", reprise, reprise.__all__),
        ("trainer.errors", reprise.errors, ("TrainerError", "CheckpointError", "LaunchError")),
    ],
)
def test_a_former_name_gives_the_library_and_warns(
    former: str, module: object, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, former, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"{former} is now reprise"):
        forwarding = import_module(former)
    assert {name: getattr(forwarding, name) for name in names} == {name: getattr(module, name) for name in names}
    with pytest.raises(AttributeError):
        forwarding.no_such_name  # noqa: B018
