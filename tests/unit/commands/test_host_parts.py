"""Folders of one host in the commands that look into checkpoints, and in all that read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import all_files
from tests.local_folders import flip, save_on_two_hosts
from tests.messages import Printed
from tests.unit.commands.test_checkpoint import shown
from trainer.commands.checkpoint import BAD, FINE, IMPOSSIBLE, main

NAME = "iter_0000002"
HELD = ["50 % of 2 hosts: ", "; missing 1 of 2 parts: "]


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_part_is_named_and_not_damaged(tmp_path: Path, command: str, capsys: Printed) -> None:
    a, _ = save_on_two_hosts(tmp_path, 2)
    assert [path.name for path in (a / NAME).glob("config.json*")] == ["config.json.part"]  # not for transformers
    (row,) = shown(capsys, FINE, command, a)
    assert (row.get("intact") or row["result"]).startswith("a part")
    assert all(text in row["held"] for text in HELD)


def test_gather_tells_whether_folders_are_whole_together(tmp_path: Path, capsys: Printed) -> None:
    a, b = save_on_two_hosts(tmp_path, 2)
    assert main(["gather", str(a), str(b), str(tmp_path / "out")]) == FINE
    capsys.readouterr()
    (row,) = shown(capsys, FINE, "verify", tmp_path / "out")
    assert row["result"] == "whole"
    (b / NAME).rename(b / "iter_0000004")
    assert main(["gather", str(a), str(b), str(tmp_path / "other")]) == IMPOSSIBLE
    assert "1 of 2" in capsys.readouterr().err


def test_damage_in_one_of_two_copies_is_found_in_its_folder(tmp_path: Path, capsys: Printed) -> None:
    a, b = save_on_two_hosts(tmp_path, 2, copies=1)
    for command, field, expected in (("ls", "intact", "yes"), ("verify", "result", "whole")):
        (row,) = shown(capsys, FINE, command, a)
        assert row[field] == expected
        assert row["held"].startswith("100 % of 2 hosts: ")
    assert [path.name for path in (a / NAME).glob("config.json*")] == ["config.json"]
    flip(a / NAME, of_host=1)
    found = shown(capsys, BAD, "verify", a, b)
    assert [row["result"] == "whole" for row in found] == [False, True]


def test_show_has_the_share_of_a_host(tmp_path: Path, capsys: Printed) -> None:
    a, _ = save_on_two_hosts(tmp_path, 2)
    assert all(text in shown(capsys, FINE, "show", a)["held"] for text in HELD)
    assert main(["show", str(a)]) == FINE
    assert "\nA single host's folder, 50 % of 2 hosts: " in capsys.readouterr().out


def test_diff_and_prune_refuse_parts(tmp_path: Path, capsys: Printed) -> None:
    a, b = save_on_two_hosts(tmp_path, 1, 2)
    before = all_files(a)
    assert main(["diff", str(a), str(b)]) == IMPOSSIBLE
    assert main(["prune", str(a), "--keep", "1"]) == IMPOSSIBLE
    assert "iter_0000002" in capsys.readouterr().err
    assert all_files(a) | {"lock": b""} == before | {"lock": b""}
