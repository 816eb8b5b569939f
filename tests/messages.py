"""The page of all messages: what a refusal says stands in `golden/messages.md`, one section a test.

A test names the class of an error, and the keys and places that it must name:

    with refused(ConfigError, "train.global_batch_size"):
        check(config)

The whole text is compared with the page, without what differs between runs and machines. `make messages` writes the
page anew from the tests; a change of words is that page's diff, which a reviewer reads.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

PAGE = Path(__file__).with_name("golden") / "messages.md"
# The file that the processes of a run append to, in place of a comparison; see `make messages`.
WRITTEN = "REPRISE_WRITE_MESSAGES"

_TITLE = "# What each refusal says\n\nWritten by `make messages` from the tests, and read by a person.\n"
_VARIABLE = [
    (re.compile(r"(?:file://)?(?:/[^\s/'\",:;]+)+/(?:pytest-\d+|popen-gw\d+)/[^\s/'\",:;()]+"), "TMP"),
    (re.compile(re.escape(str(PAGE.parents[2])) + r"(?=[/\s'\",:;.)]|$)"), "CHECKOUT"),
    (re.compile(r"(?:file://)?(?:/[^\s/'\",:;]+)+/(?:test_\w{1,30}?\d+)(?=[/\s'\",:;.)]|$)"), "TMP"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\b"), "DATE"),
    (re.compile(r"\bpid \d+"), "pid PID"),
    (re.compile(r"\bhost [\w.-]+"), "host HOST"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b"), "HEX"),
    (re.compile(r"\b\d+\.\d{3,}(?:e[+-]?\d+)?\b"), "NUMBER"),
]

E = TypeVar("E", bound=BaseException)
Printed = pytest.CaptureFixture[str]


@contextmanager
def refused(kind: type[E], *words: str) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of a class that names these words, keys and places, and says what the page has of this test."""
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} are not named by: {text}"
    says(text)


def says(text: str) -> None:
    """Compare a message with the page of messages."""
    test = re.sub(r" \(\w+\)$", "", os.environ["PYTEST_CURRENT_TEST"])
    number = _counts[test]
    _counts[test] += 1
    line = steady(text)
    if path := os.environ.get(WRITTEN):
        with open(path, "a") as file:
            file.write(json.dumps([test, number, line]) + "\n")
        return
    expected = _page().get(test, [])
    assert number < len(expected), f"the page has no such message (`make messages` writes it): {line}"
    assert line == expected[number], "the words have changed (`make messages` writes them into the page)"


def steady(text: str) -> str:
    """Return a message without what differs between two runs: folders, hosts, processes, times and digests."""
    for pattern, name in _VARIABLE:
        text = pattern.sub(name, text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


_counts: defaultdict[str, int] = defaultdict(int)


@cache
def _page() -> dict[str, list[str]]:
    return read(PAGE.read_text()) if PAGE.exists() else {}


def read(page: str) -> dict[str, list[str]]:
    """Return the messages of each test on a page."""
    sections = (section.partition("\n") for section in page.split("\n## ")[1:])
    return {test: re.findall(r"^```text\n(.*?)\n```$", texts, re.DOTALL | re.MULTILINE) for test, _, texts in sections}


def page_of(messages: dict[str, list[str]]) -> str:
    """Return a page, the inverse of `read`."""
    sections = [
        f"\n## {test}\n" + "".join(f"\n```text\n{text}\n```\n" for text in texts)
        for test, texts in sorted(messages.items())
    ]
    return _TITLE + "".join(sections)


def main() -> int:
    """Write the page from what the processes of a run appended to the file named on the command line."""
    messages: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for line in Path(sys.argv[1]).read_text().splitlines():
        test, number, text = json.loads(line)
        messages[test][number] = steady(text)
    PAGE.write_text(page_of({test: [texts[n] for n in sorted(texts)] for test, texts in messages.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
