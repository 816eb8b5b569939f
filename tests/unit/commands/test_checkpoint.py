"""The command that looks into checkpoints: what it prints, what it exits with, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.channel import single_rank_channel
from reprise.folder import FORMAT, MANIFEST, STATE, FolderLock
from reprise.savers import Checkpointer, SavePolicy
from tests.fakes import lone_contents
from tests.reported_runs import steady_run
from trainer.commands.checkpoint import BAD, FINE, IMPOSSIBLE, main

VALUES = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(5, dtype=torch.bfloat16)}


def save(run: Path, iterations: list[int], values: dict[str, torch.Tensor] = VALUES, **state: Any) -> Path:
    """Save some checkpoints; return their folder."""
    folder = run / "checkpoints"
    run.mkdir(exist_ok=True)
    checkpointer = Checkpointer(SavePolicy(folder), single_rank_channel(), nonce="n")
    checkpointer.start()
    for iteration in iterations:
        document = {"format": FORMAT, "iteration": iteration, **state}
        report = checkpointer.save(iteration, lone_contents(values, {STATE: document}))
        assert report is not None
        assert report.error is None
    checkpointer.close()
    return folder


def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(capsys.readouterr().out, parse_constant=refuse)


def test_ls_notes_a_dropped_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "run", [5], optimizer_dropped={"manifest_xxh3_64": "0" * 16})
    for check in ("1", "0"):
        assert main(["ls", str(tmp_path / "run"), "--json", "--check", check]) == FINE
        (row,) = shown(capsys)
        assert row["notes"] == "optimizer dropped"


def test_ls_says_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = {"world_size": 8, "dp": 4, "tp": 2, "pp": 1, "vpp": 1, "zero_stage": 3}
    folder = save(tmp_path / "run", [5, 10], topology=topology, valid_loss=2.5)
    (folder / "iter_0000005" / "hold").touch()
    for named in (tmp_path / "run", folder):
        assert main(["ls", str(named), "--json"]) == FINE
        held, newest = shown(capsys)
        assert (held["iteration"], held["notes"], newest["iteration"], newest["notes"]) == (5, "hold", 10, "")
        assert (newest["intact"], newest["valid_loss"], newest["topology"]) == (
            "yes",
            2.5,
            "8 ranks dp=4 tp=2 zero_stage=3",
        )
        assert newest["bytes"] == sum(file.stat().st_size for file in (folder / "iter_0000010").rglob("*"))
        assert 0 <= newest["age"] < 60
    assert main(["ls", str(tmp_path / "run")]) == FINE
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["checkpoint", "iteration", "bytes", "age", "topology", "valid_loss", "intact", "notes"]
    assert table[2].startswith("iter_0000010  10")


def test_ls_names_what_is_damaged_and_lists_what_is_superseded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "run", [5, 10])
    (folder / "iter_0000005" / STATE).write_text("{}")
    (folder / "iter_0000010").rename(folder / "iter_0000010.superseded-1")
    assert main(["ls", str(tmp_path / "run"), "--json"]) == BAD
    damaged, superseded = shown(capsys)
    assert damaged["intact"].startswith("no: A file has the wrong size")
    assert (superseded["iteration"], superseded["intact"], superseded["notes"]) == (10, "yes", "superseded")


def test_ls_says_how_many_it_has_not_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "run", [5, 10, 15], valid_loss=2.5)
    (folder / "iter_0000005" / "config.json").write_text("{")
    (folder / "iter_0000005" / "model.safetensors").write_bytes(b"")
    assert main(["ls", str(folder), "--check", "1"]) == FINE
    *table, last = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in table[1:]] == [["not", "checked"], ["not", "checked"], ["2.5", "yes"]]
    assert last == "2 of 3 checkpoints were not checked; --check all checks them too"
    assert main(["ls", str(folder), "--check", "2"]) == FINE
    assert "1 of 3 checkpoints was not checked; --check all checks them too" in capsys.readouterr().out
    assert main(["ls", str(folder), "--check", "0", "--json"]) == FINE
    assert {(row["intact"], row["valid_loss"]) for row in shown(capsys)} == {("not checked", 2.5)}
    assert main(["ls", str(folder), "--check", "all"]) == BAD
    assert "not checked" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["ls", str(folder), "--check", "some"])
    assert "argument --check: invalid" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["ls"], ["show"], ["verify"], ["prune", "--keep", "1"]])
def test_a_folder_without_checkpoints_is_said_so(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path / "nowhere")]) == IMPOSSIBLE
    assert f"checkpoint: There is no such folder ({tmp_path / 'nowhere'})" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main([*command, str(tmp_path / "file")]) == IMPOSSIBLE
    assert f"A path is a file where a folder is expected ({tmp_path / 'file'})" in capsys.readouterr().err
    if command[0] != "prune":
        assert main([*command, str(tmp_path)]) == IMPOSSIBLE
        assert "holds no checkpoint" in capsys.readouterr().err


def test_show_tells_state_files_and_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "run", [5, 10], lr=0.125, environment={"math": {"kernels": "AVX2"}})
    assert main(["show", str(tmp_path / "run"), "--json"]) == FINE
    newest = shown(capsys)
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


def test_the_bytes_of_a_damaged_checkpoint_are_no_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "run", [5, 10])
    (folder / "iter_0000005" / STATE).write_text("{}")
    for path in (folder / "iter_0000010").iterdir():
        path.unlink()
    (folder / "iter_0000010" / MANIFEST).write_text("{}")
    for command in ("ls", "verify"):
        assert main([command, str(tmp_path / "run")]) == BAD
        assert "0.000 MB" not in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "run"), "--json"]) == BAD
    assert [row["bytes"] for row in shown(capsys)] == [None, None]
    assert main(["ls", str(tmp_path / "run")]) == BAD
    assert " 2 B " in capsys.readouterr().out


def test_verify_reads_every_byte_and_names_the_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "run", [5, 10])
    assert main(["verify", str(tmp_path / "run"), "--json"]) == FINE
    assert [(row["bytes"], row["result"]) for row in shown(capsys)] == [(34, "whole")] * 2
    weights = folder / "iter_0000010" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert main(["verify", str(folder / "iter_0000005"), str(folder / "iter_0000010")]) == BAD
    text = capsys.readouterr().out
    assert "A tensor is damaged" in text
    assert "tensor b.weight" in text


def test_diff_of_equal_checkpoints_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = save(tmp_path / "a", [5]), save(tmp_path / "b", [5])
    assert main(["diff", str(a), str(b)]) == FINE
    assert capsys.readouterr().out == "2 of 2 tensors are equal, bit for bit\n"


def test_diff_tells_how_tensors_and_state_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = {
        "bits": torch.tensor([0.0, 1.0]), "half": torch.ones(3), "larger": torch.arange(4.0), "lost": torch.ones(1),
        "number": torch.tensor([1.0]), "same": torch.full((2,), torch.nan), "wide": torch.ones(2, 2),
    }  # fmt: skip
    b = {
        "bits": torch.tensor([-0.0, 1.0]), "half": torch.ones(3, dtype=torch.bfloat16),
        "larger": torch.tensor([0.0, 1.5, 2.0, -3.0]), "new": torch.ones(1), "number": torch.tensor([torch.nan]),
        "same": torch.full((2,), torch.nan), "wide": torch.ones(4),
    }  # fmt: skip
    left, right = save(tmp_path / "a", [5], a, lr=1.0), save(tmp_path / "b", [5], b, lr=2.0, extra={"deep": 1})
    assert main(["diff", str(left), str(right), "--json"]) == BAD
    found = shown(capsys)
    rows = {
        row["tensor"]: (row["found"], row["largest difference"], row["differing values"]) for row in found["tensors"]
    }
    assert rows == {
        "bits": ("values", 0.0, 1),
        "half": ("dtype", 0.0, 0),
        "larger": ("values", 6.0, 2),
        "lost": ("only in A", None, 0),
        "new": ("only in B", None, 0),
        "number": ("values", None, 1),
        "same": ("equal", 0.0, 0),
        "wide": ("shape", None, 0),
    }
    assert found["state"] == [
        {"field": "extra", "A": "(absent)", "B": {"deep": 1}},
        {"field": "lr", "A": 1.0, "B": 2.0},
    ]


def test_what_is_no_number_in_two_dtypes_is_equal_in_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inf, nan = torch.inf, torch.nan
    values = {"same": torch.tensor([nan, inf, -inf, 1.0]), "other": torch.tensor([nan, inf, 1.0, inf])}
    others = {"same": values["same"].bfloat16(), "other": torch.tensor([1.0, -inf, nan, inf]).bfloat16()}
    left, right = save(tmp_path / "a", [5], values), save(tmp_path / "b", [5], others)
    assert main(["diff", str(left), str(right), "--json"]) == BAD
    rows = {row["tensor"]: row for row in shown(capsys)["tensors"]}
    found = {name: (row["found"], row["largest difference"], row["differing values"]) for name, row in rows.items()}
    assert found == {"same": ("dtype", 0.0, 0), "other": ("dtype", None, 3)}
    assert main(["diff", str(left), str(right)]) == BAD
    assert "inf" in capsys.readouterr().out


@pytest.mark.parametrize("topology", [
    7, None, "dp=2", [1, 2], {"dp": "2"}, {"dp": None, "world_size": [1]}, {"world_size": "x" * 100}, {"tp": True},
])  # fmt: skip
def test_a_topology_of_odd_types_is_shown_as_it_is(
    tmp_path: Path, topology: object, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run", [5], topology=topology, valid_loss=topology)
    assert main(["ls", str(tmp_path / "run"), "--json"]) == FINE
    (row,) = shown(capsys)
    assert row["topology"].startswith(json.dumps(topology)[:40])
    assert len(row["topology"]) < 70
    for command in ("ls", "show"):
        assert main([command, str(tmp_path / "run")]) == FINE


def test_prune_keeps_what_it_says_and_says_what_it_deletes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "run", [1, 2, 3, 4, 5])
    (folder / "iter_0000001" / "hold").touch()
    command = ["prune", str(tmp_path / "run"), "--keep", "1", "--retain-interval", "4", "--json"]
    assert main([*command, "--dry-run"]) == FINE
    assert [(row["iteration"], row["deleted"]) for row in shown(capsys)] == [(2, False), (3, False)]
    assert len(list(folder.glob("iter_*"))) == 5
    assert main(command) == FINE
    assert [(row["iteration"], row["deleted"]) for row in shown(capsys)] == [(2, True), (3, True)]
    assert sorted(path.name[-1] for path in folder.glob("iter_*")) == ["1", "4", "5"]
    assert not list(folder.glob(".*"))


def test_prune_does_not_touch_the_folder_of_a_job_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "run", [1, 2, 3])
    lock = FolderLock(folder, "another job")
    lock.acquire()
    assert main(["prune", str(folder), "--keep", "1"]) == IMPOSSIBLE
    lock.release()
    assert "This process writes to this checkpoint folder" in capsys.readouterr().err
    assert len(list(folder.glob("iter_*"))) == 3


def test_prune_deletes_nothing_if_only_damaged_ones_would_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "run", [1, 2])
    (folder / "iter_0000002" / STATE).unlink()
    assert main(["prune", str(folder), "--keep", "1"]) == IMPOSSIBLE
    assert "None of the checkpoints that would stay is whole" in capsys.readouterr().err
    assert len(list(folder.glob("iter_*"))) == 2
    with pytest.raises(SystemExit):
        main(["prune", str(folder), "--keep", "0"])
    with pytest.raises(SystemExit):
        main(["prune", str(folder), "--keep", "1", "--retain-interval", "-1"])


def test_a_list_ends_with_the_goodput_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(steady_run(tmp_path, [1.0] * 8), [5])
    assert main(["ls", str(tmp_path)]) == FINE
    assert capsys.readouterr().out.splitlines()[-1] == "goodput 80.0% of 10.0 s: started 20.0%"


def test_a_list_leaves_a_long_log_to_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.commands.checkpoint._LONG_LOG_BYTES", 10)
    save(tmp_path, [5])
    (tmp_path / "metrics.jsonl").write_text("x" * 11)
    assert main(["ls", str(tmp_path)]) == FINE
    assert f"`reprise report {tmp_path}` reads" in capsys.readouterr().out.splitlines()[-1]
