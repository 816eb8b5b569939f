"""The page of `reprise report` in a real browser, without a network: Debian's Chromium, driven by playwright.

`make test-report` installs playwright; Chromium is a package of the system (`apt-get install chromium`).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reported_runs import steady_run, twice_killed_run
from trainer.commands.report import write_report

pytest.importorskip("playwright")
pytestmark = pytest.mark.slow

PICTURES = Path(__file__).parents[2] / "docs/pictures"
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

    def colors(self, chart: str) -> int:
        """Return how many colors the pixels of a chart have."""
        from io import BytesIO

        from PIL import Image

        picture = Image.open(BytesIO(self.picture(chart))).convert("RGB")
        return len(picture.getcolors(1 << 24) or ())

    def picture(self, chart: str) -> bytes:
        """Return a picture of a chart."""
        return bytes(self.tab.locator(f"#chart-{chart}").screenshot())

    def drag(self, chart: str, begin: float, end: float) -> None:
        """Drag the pointer between two shares of the width of a chart, which zooms."""
        box = self.tab.locator(f"#chart-{chart}").bounding_box()
        y = box["y"] + box["height"] / 2
        self.tab.mouse.move(box["x"] + box["width"] * begin, y)
        self.tab.mouse.down()
        self.tab.mouse.move(box["x"] + box["width"] * end, y, steps=5)
        self.tab.mouse.up()

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
    runs = [twice_killed_run(folder / "killed"), steady_run(folder / "other", [1.01 * loss for loss in LOSSES])]
    write_report(runs, folder / "report.html")
    return folder / "report.html"


def test_hovering_shows_the_value_of_the_log(browser: Any, page: Path) -> None:
    opened = OpenPage(browser, page)
    name, iteration, loss = opened.hover("loss", 0.5).splitlines()[:3]
    log = page.parent / name.strip() / "metrics.jsonl"
    records = {
        record["iteration"]: record for record in map(json.loads, log.read_text().splitlines()) if "loss" in record
    }
    assert float(loss.removeprefix("loss ")) == records[int(iteration.removeprefix("iteration "))]["loss"]
    assert opened.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_charts_are_drawn_and_fit_the_screen(browser: Any, page: Path, width: int, scheme: str) -> None:
    opened = OpenPage(browser, page, width=width, scheme=scheme)
    for chart in ("loss", "difference", "grad_norm", "life-0", "tokens_per_second"):
        assert opened.colors(chart) > 20, chart
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.problems == []


def test_a_reader_changes_the_axes_and_zooms(browser: Any, page: Path) -> None:
    opened = OpenPage(browser, page)
    controls = opened.tab.locator("#controls-loss")
    pictures = [opened.picture("loss")]
    changes: list[Callable[[], object]] = [
        lambda: controls.get_by_label("logarithmic").check(),
        lambda: controls.get_by_label("x axis").select_option("hours"),
        lambda: controls.get_by_label("smoothing").select_option("100"),
        lambda: controls.get_by_label("other", exact=True).uncheck(),
        lambda: opened.drag("loss", 0.3, 0.6),
    ]
    for change in changes:
        change()
        opened.tab.wait_for_timeout(200)  # until it is drawn
        pictures.append(opened.picture("loss"))
    assert len(set(pictures)) == len(pictures)
    assert opened.problems == []


def test_the_pictures_of_the_documents_are_made(browser: Any, page: Path) -> None:
    opened = OpenPage(browser, page, width=1000)
    for chart, name in (("loss", "report_loss"), ("life-0", "report_life")):
        picture = opened.tab.locator("section", has=opened.tab.locator(f"#chart-{chart}")).screenshot()
        (PICTURES / f"{name}.png").write_bytes(picture)
        assert len(picture) < 100_000
