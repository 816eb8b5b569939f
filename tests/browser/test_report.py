"""The page of `reprise report` in a real browser, without a network: Debian's Chromium, driven by playwright.

`make test-report` installs playwright; Chromium is a package of the system (`apt-get install chromium`).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reported_runs import steady_run
from trainer.commands.report import write_report

pytest.importorskip("playwright")
pytestmark = pytest.mark.slow

LOSSES = [5 / math.sqrt(n) + 0.05 * math.sin(n) for n in range(1, 501)]
TOOLTIP = """() => {
  const texts = [];
  const visit = (node) => {
    if (node.className && String(node.className).includes("bk-tooltip-content")) texts.push(node.innerText);
    for (const child of node.children || []) visit(child);
    if (node.shadowRoot) for (const child of node.shadowRoot.children) visit(child);
  };
  visit(document.body);
  return texts.join("\\n");
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path is not None, "no chromium on PATH: apt-get install chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


class OpenPage:
    """A page in a tab without a network.

    Attributes:
        problems: what the console and the network complained of.
    """

    def __init__(self, browser: Any, path: Path, *, width: int = 1280, scheme: str = "light") -> None:
        self.problems: list[str] = []
        context = browser.new_context(
            offline=True, color_scheme=scheme, viewport={"width": width, "height": 900}, device_scale_factor=1
        )
        self.tab = context.new_page()
        self.tab.on("console", self._note)
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("requestfailed", lambda request: self.problems.append(request.url[:100]))
        self.tab.goto(path.as_uri())
        self.tab.wait_for_selector("html[data-state=drawn]", timeout=30_000)

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def colours(self, chart: str) -> int:
        """Return how many colours the pixels of a chart have."""
        from io import BytesIO

        from PIL import Image

        picture = Image.open(BytesIO(self.tab.locator(f"#chart-{chart}").screenshot())).convert("RGB")
        return len(picture.getcolors(1 << 24) or ())

    def hover(self, chart: str, share: float) -> str:
        """Return the text beside the pointer at a share of the width of a chart."""
        box = self.tab.locator(f"#chart-{chart}").bounding_box()
        for step in range(3):  # the first move enters the chart
            self.tab.mouse.move(box["x"] + box["width"] * share + step, box["y"] + box["height"] / 2)
        self.tab.wait_for_function(f"({TOOLTIP})() !== ''", timeout=10_000)
        return str(self.tab.evaluate(TOOLTIP))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report([steady_run(folder / "run", LOSSES)], folder / "report.html")
    return folder / "report.html"


def test_hovering_shows_the_value_of_the_log(browser: Any, page: Path) -> None:
    opened = OpenPage(browser, page)
    lines = opened.hover("loss", 0.5).splitlines()
    iteration = int(lines[1].removeprefix("iteration "))
    records = [json.loads(line) for line in (page.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    assert float(lines[2].removeprefix("loss ")) == records[iteration - 1]["loss"]
    assert opened.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_curves_are_drawn_and_fit_the_screen(browser: Any, page: Path, width: int, scheme: str) -> None:
    opened = OpenPage(browser, page, width=width, scheme=scheme)
    assert opened.colours("loss") > 20
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.problems == []
