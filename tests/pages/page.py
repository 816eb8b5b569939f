"""Runs the code blocks of a page in the order in which they stand, in one folder.

| block | what happens |
|---|---|
| `sh` | runs in bash up to the first command that fails; does not run if its first line is `# not run: REASON` |
| `console` | a line after `$` runs, with any status, and the other lines are compared as those of a `text` block |
| `text` after such a block | its lines occur in the output, in this order; times, rates and the folder may differ |
| `python` | runs in the page's namespace; its output is read as that of a command |
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

from sybil import Document, Example, Lexeme
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser

NOT_RUN = "# not run: "
BASH = "%%bash\n"
COMMAND_LIMIT_S = 300.0
_MEASURED = re.compile(r"\d[\d.,]*(?:e-?\d+)? ?(?=%|(?:ms|s|GB|GB/s|tok/s)\b)")
_START = re.compile(r"^started in .*", re.M)  # its phases are in seconds too
_PHASE_SECONDS = re.compile(r"(?<=[a-z] )\d+\.\d(?=,|$)")


class PageRunner:
    """The evaluators of a page's blocks, and the output of the block before.

    `small` replaces words of the commands by what a test can carry out: a tiny model, two ranks, a folder as store.
    `names` is a program that runs before the first Python block, for the names that it uses.
    """

    def __init__(self, folder: Path, small: Mapping[str, str] | None = None, names: str = "") -> None:
        self._folder = folder
        self._names = names
        self._small = dict(small or {})
        self._output: str | None = None
        self._python = PythonEvaluator()

    def run(self, page: Path) -> int:
        """Run the blocks of `page` and return the number of those that ran.

        Raises:
            AssertionError: a command failed, or a line of its output on the page is missing in its output.
        """
        evaluators = {"sh": self._sh, "console": self._console, "text": self._text, "python": self._run_python}
        parsers = [CodeBlockParser(language, evaluator) for language, evaluator in evaluators.items()]
        count = 0
        for example in Document.parse(str(page), *parsers).examples():
            example.evaluate()
            count += not str(example.parsed).startswith(NOT_RUN)
        return count

    def run_notebook(self, notebook: Path) -> int:
        """Run the code cells of a Jupyter notebook, those of the shell by their `%%bash`, and return their number."""
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        page = self._folder / notebook.with_suffix(".md").name
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        fences = [f"sh\n{text[len(BASH) :]}" if text.startswith(BASH) else f"python\n{text}" for text in sources]
        page.write_text("".join(f"```{fence}\n```\n" for fence in fences), encoding="utf-8")
        return self.run(page)

    def _sh(self, example: Example) -> None:
        self._output = None
        if str(example.parsed).startswith(NOT_RUN):
            return
        status, output = self.run_bash(str(example.parsed))
        assert status == 0, f"{example.path}:{example.line}: status {status}\n{output}"
        self._output = output

    def _console(self, example: Example) -> None:
        lines = str(example.parsed).splitlines()
        _, self._output = self.run_bash("\n".join(line[2:] for line in lines if line.startswith("$ ")))
        self._require(example, [line for line in lines if not line.startswith("$ ")])

    def run_bash(self, command: str) -> tuple[int, str]:
        """Run commands, and return their exit status and their output."""
        command = self._replaced(command)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self._folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_LIMIT_S,
        )
        return ended.returncode, ended.stdout

    def _run_python(self, example: Example) -> None:
        stream = StringIO()
        with chdir(self._folder), redirect_stdout(stream):
            exec(compile(self._names, "names", "exec"), example.namespace)  # noqa: S102 - of our own tests
            self._names = ""
            block = example.parsed
            example.parsed = Lexeme(self._replaced(block), block.offset, block.line_offset)
            self._python(example)
        self._output = stream.getvalue()

    def _text(self, example: Example) -> None:
        if self._output is not None:
            self._require(example, str(example.parsed).splitlines())

    def _require(self, example: Example, expected: list[str]) -> None:
        """Raise an AssertionError unless the lines occur in the output, in their order."""
        lines = iter(self._comparable(self._output or "").splitlines())
        for line in expected:
            assert self._comparable(self._replaced(line).replace("$PWD", str(self._folder))) in lines, (
                f"{example.path}:{example.line}: {line!r} is missing in\n{self._output}"
            )

    def _replaced(self, text: str) -> str:
        for word, replacement in self._small.items():
            text = text.replace(word, replacement)
        return text

    def _comparable(self, text: str) -> str:
        """Return `text` without measured numbers and without the folder."""
        text = _MEASURED.sub("", text.replace(f"{self._folder}/", "").replace(str(self._folder), "."))
        return _START.sub(lambda line: _PHASE_SECONDS.sub("", line[0]), text)
