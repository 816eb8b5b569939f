"""The command `reprise`: the subcommand it calls, the status it returns, and the text it prints where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import trainer.__main__
from reprise import __version__
from tests import ROOT
from tests.harness import DEADLINE_S
from tests.messages import Printed
from trainer.commands import checkpoint
from trainer.commands.main import COMMANDS, main

ARGPARSE = sorted(set(COMMANDS) - {"train"})


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    process = [sys.executable, "-m", "reprise", *words]
    return subprocess.run(process, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)


class Interrupting:
    """A finder of modules that is interrupted, as by Ctrl-C, when it looks for one of them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name == self._name:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("call", "module", "line"),
    [
        (trainer.__main__.main, "trainer.train_command", "Interrupted before the first iteration. Nothing was saved."),
        (lambda: main(["train"]), "trainer.__main__", "reprise train: interrupted"),
    ],
    ids=["python -m trainer", "reprise train"],
)
def test_an_interrupted_import_is_one_line(
    call: Callable[[], int],
    module: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Printed,
) -> None:
    monkeypatch.setattr(sys, "meta_path", [Interrupting(module), *sys.meta_path])
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert call() == 130
    assert capsys.readouterr().err == f"{line}\n"


def test_without_a_command_there_is_help(capsys: Printed) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out.split("commands:\n")[1].split("\n\n")[0]
    assert {line.split()[0] for line in text.splitlines() if line[:5].strip()} == {"COMMAND", *COMMANDS}
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"reprise {__version__}\n"
    for words, line in (([], "required: COMMAND"), (["chekpoint"], "invalid choice: 'chekpoint'"), (["x"], "'x'")):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        out, err = capsys.readouterr()
        assert out == ""
        assert line in err
    assert [name for name in COMMANDS if name not in err] == []


def test_a_command_has_its_tools_status_or_names_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    def call(arguments: Sequence[str]) -> int:
        if list(arguments) == ["hydra"]:
            raise ModuleNotFoundError("No module named 'hydra'", name="hydra.core")
        if list(arguments) != ["a", "--b"]:
            raise KeyboardInterrupt
        return 7

    monkeypatch.setitem(sys.modules, "trainer.commands.doctor", SimpleNamespace(main=call))
    assert main(["doctor", "a", "--b"]) == 7
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "reprise doctor: interrupted\n"
    assert main(["doctor", "hydra"]) == 2
    assert capsys.readouterr().err == "reprise doctor needs another package: pip install hydra-core\n"


SUBCOMMANDS = [f"checkpoint {name}" for name in ("ls", "show", "verify", "diff", "prune")]


@pytest.mark.parametrize("words", [*ARGPARSE, *SUBCOMMANDS, "convert import hf", "convert export dcp"])
def test_every_command_has_a_help_under_its_own_name(words: str, capsys: Printed) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*words.split(), "--help"])
    assert capsys.readouterr().out.startswith(f"usage: reprise {words} ")


@pytest.mark.parametrize("command", ["compare-loss", "compare-steps", "report"])
def test_a_file_that_no_system_takes_is_one_line(command: str, capsys: Printed) -> None:
    assert main([command, "x" * 300, "y" * 300]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"reprise {command}: ")
    assert "too long" in line


def test_train_is_the_program_of_python_m_trainer() -> None:
    helped = run("train", "--help")
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith("usage: reprise train KEY=VALUE ...")
    refused = run("train", "train.train_itters=3")
    assert refused.returncode == 1
    assert refused.stderr.startswith("ConfigError: ")
    assert len(refused.stderr.splitlines()) == 1
    wrong = run("train", "--wrong")
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1] == "reprise train: error: unrecognized arguments: --wrong"


HELP = [("--help",), pytest.param(("train", "--help"), marks=pytest.mark.slow), ("compare-loss", "--help")]


@pytest.mark.parametrize("words", HELP)
def test_a_reader_that_has_seen_enough_is_no_error(words: tuple[str, ...]) -> None:
    line = "import sys; from trainer.commands.main import main; sys.stdin.read(); sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-c", line, *words],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate("", timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")


def test_a_working_folder_that_is_gone_is_no_named_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert checkpoint.main(["ls", "run"]) == 2
    assert capsys.readouterr().err == "reprise checkpoint: No such file or directory\n"
