"""Runs the code blocks of a page in the order in which they stand, in one folder.

| block | what happens |
|---|---|
| `sh` | runs in bash up to the first command that fails; does not run if its first line is `# not run: REASON` |
| `text` after such a block | its lines occur in the output, in this order; times, rates and the folder may differ |
| `python` | runs in the page's namespace; its output is read as that of a command |
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser

NOT_RUN = "# not run: "
COMMAND_LIMIT_S = 300.0
_MEASURED = re.compile(r"\d[\d.,]*(?:e-?\d+)? ?(?=(?:ms|s|GB/s|tok/s)\b)")


class PageRunner:
    """The evaluators of a page's blocks, and the output of the block before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._output: str | None = None
        self._python = PythonEvaluator()

    def run(self, page: Path) -> int:
        """Run the blocks of `page` and return the number of those that ran.

        Raises:
            AssertionError: a command failed, or a line of its output on the page is missing in its output.
        """
        evaluators = {"sh": self._sh, "text": self._text, "python": self._run_python}
        parsers = [CodeBlockParser(language, evaluator) for language, evaluator in evaluators.items()]
        count = 0
        for example in Document.parse(str(page), *parsers).examples():
            example.evaluate()
            count += not str(example.parsed).startswith(NOT_RUN)
        return count

    def _sh(self, example: Example) -> None:
        self._output = None
        if str(example.parsed).startswith(NOT_RUN):
            return
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", str(example.parsed)],
            cwd=self._folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_LIMIT_S,
        )
        assert ended.returncode == 0, f"{example.path}:{example.line}: status {ended.returncode}\n{ended.stdout}"
        self._output = ended.stdout

    def _run_python(self, example: Example) -> None:
        stream = StringIO()
        with chdir(self._folder), redirect_stdout(stream):
            self._python(example)
        self._output = stream.getvalue()

    def _text(self, example: Example) -> None:
        if self._output is None:
            return
        lines = iter(self._comparable(self._output).splitlines())
        for expected in self._comparable(str(example.parsed)).splitlines():
            assert expected in lines, f"{example.path}:{example.line}: {expected!r} is missing in\n{self._output}"

    def _comparable(self, text: str) -> str:
        """Return `text` without measured numbers and without the folder."""
        return _MEASURED.sub("", text.replace(str(self._folder), "."))
