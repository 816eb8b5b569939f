"""The command that looks into checkpoints: what it prints, what it exits with, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.format import FORMAT, MANIFEST, STATE
from tests.fakes import flip_bit, lone_contents, save_parts
from tests.harness import TINY, run_ok
from tests.messages import Printed
from trainer.commands.checkpoint import BAD, FINE, IMPOSSIBLE, main

VALUES = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(5, dtype=torch.bfloat16)}


def save(run: Path, iterations: list[int], values: dict[str, torch.Tensor] = VALUES, **state: Any) -> Path:
    """Save some checkpoints; return their folder."""
    for iteration in iterations:
        contents = lone_contents(values, {STATE: {"format": FORMAT, "iteration": iteration, **state}})
        save_parts(run / "checkpoints", iteration, lambda _, contents=contents: contents)
    return run / "checkpoints"


def shown(capsys: Printed, status: int, *words: object) -> Any:
    """Return what a command prints as JSON, which ends with this status."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert main([*map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out, parse_constant=refuse)


def test_ls_says_what_there_is(tmp_path: Path, capsys: Printed) -> None:
    topology = {"world_size": 8, "dp": 4, "tp": 2, "pp": 1, "vpp": 1, "zero_stage": 3}
    folder = save(tmp_path / "run", [5, 10, 15, 20], topology=topology, valid_loss=2.5)
    (folder / "iter_0000005" / STATE).write_text("{}")
    (folder / "iter_0000010").rename(folder / "iter_0000010.superseded-1")
    (folder / "iter_0000015" / "hold").touch()
    for named in (tmp_path / "run", folder):
        rows = shown(capsys, BAD, "ls", named)
        assert [(row["iteration"], row["intact"][:4], row["notes"]) for row in rows] == [
            (5, "no: ", ""), (10, "yes", "superseded"), (15, "yes", "held"), (20, "yes", "best"),
        ]  # fmt: skip
        assert (rows[3]["valid_loss"], rows[3]["topology"]) == (2.5, "8 ranks dp=4 tp=2 zero_stage=3")
        assert rows[3]["bytes"] == sum(file.stat().st_size for file in (folder / "iter_0000020").rglob("*"))
        assert 0 <= rows[3]["age"] < 60
    assert main(["ls", str(tmp_path / "run")]) == BAD
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["checkpoint", "iteration", "size", "age", "topology", "valid_loss", "intact", "notes"]
    assert (table[1].split()[-1], table[4].split()[:2]) == ("no", ["iter_0000020", "20"])
    flip_bit(folder / "iter_0000020" / "model.safetensors")  # the last byte, which `ls` does not read
    assert main(["ls", str(tmp_path / "run")]) == BAD
    assert "headers, first blocks  best" in capsys.readouterr().out.splitlines()[4]
    assert f"{folder}/iter_0000005: {rows[0]['intact'].removeprefix('no: ')}" in table[5:]


def test_ls_says_that_a_rule_keeps_a_checkpoint(tmp_path: Path, capsys: Printed) -> None:
    run = tmp_path / "run"
    keys = ["max_checkpoint_keep=1", "keep_best=1", "save_retain_interval=3", "full_steps=2", "save_interval=1"]
    words = ["train.train_iters=6", "train.eval_interval=3", "schedule.lr_decay_style=constant"]
    words.append("optimizer.weight_decay=6000")  # makes weights grow fivefold an iteration: the first loss is best
    run_ok(run, ["model=gpt2_tiny", *TINY, *words, *(f"checkpoint.{key}" for key in keys)])
    notes = {row["iteration"]: (row["valid_loss"], row["notes"]) for row in shown(capsys, FINE, "ls", run)}
    assert {number: note for number, (_, note) in notes.items()} == {
        2: "kept by a rule", 3: "best, kept by a rule", 6: "",
    }  # fmt: skip
    assert notes[3] < notes[6]


def test_ls_says_how_many_it_has_not_checked(tmp_path: Path, capsys: Printed) -> None:
    folder = save(tmp_path / "run", [5, 10, 15], valid_loss=2.5, optimizer_dropped={"manifest_xxh3_64": "0" * 16})
    (folder / "iter_0000005" / "model.safetensors").write_bytes(b"")
    for check, status, checked in (("0", FINE, 0), ("1", FINE, 1), ("2", FINE, 2), ("all", BAD, 3)):
        rows = shown(capsys, status, "ls", folder, "--check", check)
        assert [row["intact"] == "not checked" for row in rows] == [True] * (3 - checked) + [False] * checked
        intact = {row["notes"] for row in rows if row["intact"] in ("yes", "not checked")}
        assert intact <= {"optimizer dropped", "best, optimizer dropped"}
        assert main(["ls", str(folder), "--check", check]) == status
        assert ("--check all" in capsys.readouterr().out) == (checked < 3)
    with pytest.raises(SystemExit):
        main(["ls", str(folder), "--check", "some"])


@pytest.mark.parametrize("command", ["ls", "show", "verify", "prune --keep 1"])
def test_a_folder_without_checkpoints_is_said_so(tmp_path: Path, command: str, capsys: Printed) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "nowhere", tmp_path / "file", *([] if "prune" in command else [tmp_path])):
        assert main([*command.split(), str(folder)]) == IMPOSSIBLE
        assert str(folder) in capsys.readouterr().err


def test_show_tells_state_files_and_tensors(tmp_path: Path, capsys: Printed) -> None:
    folder = save(tmp_path / "run", [5, 10], lr=0.125, environment={"math": {"kernels": "AVX2"}})
    newest = shown(capsys, FINE, "show", tmp_path / "run")
    assert newest["state"]["iteration"] == 10
    assert newest["tensors"][0] | {"file": ""} == {
        "tensor": "a.weight", "dtype": "F32", "shape": [2, 3], "bytes": 24, "file": "",
    }  # fmt: skip
    assert {row["file"] for row in newest["files"]} >= {STATE, "model.safetensors"}
    assert main(["show", str(folder / "iter_0000005")]) == FINE
    text = capsys.readouterr().out
    fields = ("lr                        0.125", "environment.math.kernels  AVX2")
    for piece in ("iter_0000005", *fields, "b.weight  BF16   [5]"):
        assert piece in text


def test_verify_reads_every_byte_and_names_the_damage(tmp_path: Path, capsys: Printed) -> None:
    folder = save(tmp_path / "run", [5, 10, 15])
    assert [(row["bytes"], row["result"]) for row in shown(capsys, FINE, "verify", tmp_path / "run")] == [
        (34, "whole")
    ] * 3
    flip_bit(folder / "iter_0000010" / "model.safetensors")
    assert main(["verify", str(folder / "iter_0000005"), str(folder / "iter_0000010")]) == BAD
    assert "tensor b.weight" in capsys.readouterr().out
    # The bytes of what cannot be opened are not zero.
    (folder / "iter_0000005" / STATE).write_text("{}")
    for path in (folder / "iter_0000015").iterdir():
        path.unlink()
    (folder / "iter_0000015" / MANIFEST).write_text("{}")
    assert [row["bytes"] for row in shown(capsys, BAD, "verify", tmp_path / "run")][::2] == [None, None]
    assert main(["ls", str(tmp_path / "run")]) == BAD
    assert " 2 B " in capsys.readouterr().out


NAN, INF = torch.nan, torch.inf
# Of a tensor in two checkpoints: what is found, the largest difference, and how many values differ.
DIFFERENCES = {
    "bits": (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), ("values", 0.0, 1)),
    "half": (torch.ones(3), torch.ones(3).bfloat16(), ("dtype", 0.0, 0)),
    "larger": (torch.arange(4.0), torch.tensor([0.0, 1.5, 2.0, -3.0]), ("values", 6.0, 2)),
    "lost": (torch.ones(1), None, ("only in A", None, 0)),
    "new": (None, torch.ones(1), ("only in B", None, 0)),
    "number": (torch.tensor([1.0]), torch.tensor([NAN]), ("values", None, 1)),
    "odd": (torch.tensor([NAN, INF, 1.0, INF]), torch.tensor([1.0, -INF, NAN, INF]).bfloat16(), ("dtype", None, 3)),
    "odd and equal": (torch.tensor([NAN, INF, -INF]), torch.tensor([NAN, INF, -INF]).bfloat16(), ("dtype", 0.0, 0)),
    "same": (torch.full((2,), NAN), torch.full((2,), NAN), ("equal", 0.0, 0)),
    "wide": (torch.ones(2, 2), torch.ones(4), ("shape", None, 0)),
}


def test_diff_tells_how_tensors_and_state_differ(tmp_path: Path, capsys: Printed) -> None:
    a, b = ({name: row[side] for name, row in DIFFERENCES.items() if row[side] is not None} for side in (0, 1))
    left, right = save(tmp_path / "a", [5], a, lr=1.0), save(tmp_path / "b", [5], b, lr=2.0, extra={"deep": 1})
    found = shown(capsys, BAD, "diff", left, right)
    fields = ("found", "largest difference", "differing values")
    rows = {row["tensor"]: tuple(row[field] for field in fields) for row in found["tensors"]}
    assert rows == {name: expected for name, (_, _, expected) in DIFFERENCES.items()}
    assert found["state"] == [
        {"field": "extra", "A": "(absent)", "B": {"deep": 1}},
        {"field": "lr", "A": 1.0, "B": 2.0},
    ]
    assert main(["diff", str(left), str(right)]) == BAD
    assert "inf" in capsys.readouterr().out
    assert main(["diff", str(left), str(left)]) == FINE
    assert capsys.readouterr().out == "10 of 10 tensors are equal, bit for bit\n".replace("10", f"{len(a)}")


@pytest.mark.parametrize("topology", [
    7, "dp=2", {"dp": "2"}, {"dp": None, "world_size": [1]}, {"world_size": "x" * 100}, {"tp": True},
])  # fmt: skip
def test_a_topology_of_odd_types_is_left_out(tmp_path: Path, topology: object, capsys: Printed) -> None:
    save(tmp_path / "run", [5], topology=topology, valid_loss=topology)
    (row,) = shown(capsys, FINE, "ls", tmp_path / "run")
    assert row["topology"] == ""
    for command in ("ls", "show"):
        assert main([command, str(tmp_path / "run")]) == FINE


def test_prune_keeps_what_it_says_and_says_what_it_deletes(tmp_path: Path, capsys: Printed) -> None:
    folder = save(tmp_path / "run", [1, 2, 3, 4, 5])
    (folder / "iter_0000001" / "hold").touch()
    command = ["prune", tmp_path / "run", "--keep", "1", "--retain-interval", "4"]
    for options, is_deleted in ((["--dry-run"], False), ([], True)):
        assert len(list(folder.glob("iter_*"))) == 5
        deleted = [(row["iteration"], row["deleted"]) for row in shown(capsys, FINE, *command, *options)]
        assert deleted == [(2, is_deleted), (3, is_deleted)]
    assert sorted(path.name[-1] for path in folder.glob("iter_*")) == ["1", "4", "5"]
    assert not list(folder.glob(".*"))


def test_prune_says_that_there_is_nothing(tmp_path: Path, capsys: Printed) -> None:
    for run in (tmp_path, f"file://{tmp_path}/absent"):
        assert main(["prune", str(run), "--keep", "1"]) == FINE
        assert capsys.readouterr().out == "0 of 0 checkpoints deleted\n"


def test_prune_refuses_to_leave_no_whole_checkpoint(tmp_path: Path, capsys: Printed) -> None:
    folder = save(tmp_path / "run", [1, 2, 3])
    (folder / "iter_0000003" / STATE).unlink()
    assert main(["prune", str(folder), "--keep", "1"]) == IMPOSSIBLE
    assert str(folder) in capsys.readouterr().err
    for options in ("--keep 0", "--keep 1 --retain-interval -1"):
        with pytest.raises(SystemExit):
            main(["prune", str(folder), *options.split()])
    assert len(list(folder.glob("iter_*"))) == 3
