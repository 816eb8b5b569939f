"""The command `reprise`: the subcommand it calls, the status it returns, and the text it prints where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

import pytest

import trainer.__main__
from reprise import __version__
from tests import ROOT
from tests.harness import DEADLINE_S
from trainer.commands.main import COMMANDS, Command, main

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
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "meta_path", [Interrupting(module), *sys.meta_path])
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert call() == 130
    assert capsys.readouterr().err == f"{line}\n"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Sequence[str]], int]], None]:
    """Put a function into the place of the program that `reprise doctor` calls."""

    def put(call: Callable[[Sequence[str]], int]) -> None:
        module = ModuleType("a_tool")
        module.main = call  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "a_tool", module)
        monkeypatch.setitem(COMMANDS, "doctor", Command("a_tool", ""))

    return put


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert {line.split()[0] for line in text.split("commands:\n")[1].split("\n\n")[0].splitlines()} == set(COMMANDS)


def test_no_command_is_a_wrong_use_and_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: reprise COMMAND")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"reprise {__version__}\n"


@pytest.mark.parametrize(("name", "hint"), [("chekpoint", "did you mean checkpoint?"), ("x", "choose from train, ")])
def test_an_unknown_command_is_one_line(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"reprise: unknown command '{name}'; {hint}")


def test_a_command_names_the_libraries_it_lacks(
    tool: Callable[[Callable[[Sequence[str]], int]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool(lambda arguments: 0)
    monkeypatch.setitem(COMMANDS, "doctor", replace(COMMANDS["doctor"], libraries=("json", "no_library", "nor_this")))
    assert main(["doctor"]) == 1
    line = "reprise doctor needs no_library and nor_this; install with: pip install 'torch-reprise[train]'\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("name", ARGPARSE)
def test_every_command_has_a_help_under_its_own_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: reprise {name} ")


@pytest.mark.parametrize(
    "words",
    [("checkpoint", name) for name in ("ls", "show", "verify", "diff", "prune")]
    + [("convert", "import", "hf"), ("convert", "export", "dcp")],
    ids=" ".join,
)
def test_a_command_of_a_command_is_named_in_full(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: reprise {' '.join(words)} ")


@pytest.mark.parametrize("words", [("compare-loss",), ("compare-steps",), ("report",)])
def test_a_file_that_no_system_takes_is_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "x" * 300, "y" * 300]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"reprise {words[0]}: ")
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


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_status_is_that_of_the_tool(status: int, tool: Callable[[Callable[[Sequence[str]], int]], None]) -> None:
    given: list[str] = []

    def call(arguments: Sequence[str]) -> int:
        given.extend(arguments)
        return status

    tool(call)
    assert main(["doctor", "a", "--b"]) == status
    assert given == ["a", "--b"]


def test_an_interrupt_is_one_line(
    tool: Callable[[Callable[[Sequence[str]], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def call(arguments: Sequence[str]) -> int:
        raise KeyboardInterrupt

    tool(call)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "reprise doctor: interrupted\n"


HELP = [("--help",), ("--version",), ("train", "--help"), ("compare-loss", "--help")]


@pytest.mark.parametrize("words", HELP, ids=" ".join)
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
