"""The page as a text, and what its charts hold; `tests/browser` opens it."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy

from tests.messages import Printed
from tests.reported_runs import steady_run
from trainer.commands.report import main, write_report

LOSSES = [5 / n + 0.01 * math.sin(n) for n in range(1, 200)]
KINDS = {"i4": numpy.int32, "f4": numpy.float32, "f8": numpy.float64}


def charts(page: str) -> dict[str, Any]:
    """Return the documents of a page's charts by their keys."""
    match = re.search(r'<script type="application/json" id="charts">(.*)</script>', page)
    assert match is not None
    return {chart["key"]: chart for chart in json.loads(match[1])}


def unpacked(packed: dict[str, str]) -> list[float]:
    data = numpy.frombuffer(base64.b64decode(packed["data"]), dtype=KINDS[packed["type"]])
    return [float(value) for value in data]


def test_the_page_has_the_bits_of_the_log(tmp_path: Path) -> None:
    (curve,) = charts(write_report([steady_run(tmp_path / "run", LOSSES)], tmp_path / "report.html").read_text())[
        "loss"
    ]["curves"]
    assert unpacked(curve["y"]) == LOSSES
    assert unpacked(curve["x"]["iteration"]) == list(range(1, 200))


def test_the_command_writes_the_page(tmp_path: Path, capsys: Printed) -> None:
    output = tmp_path / "page.html"
    assert main([str(tmp_path), "--output", str(output)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    assert main([str(steady_run(tmp_path / "<script>alert(1)<", LOSSES)), "--output", str(output)]) == 0
    assert str(output) in capsys.readouterr().out
    page = output.read_text()
    assert page.startswith("<!doctype html>")
    assert "<script>alert" not in page, "a name is no markup"
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?!data:)", page), "it needs no other file"
    assert len(page) < 1_600_000
