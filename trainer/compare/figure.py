"""Creates and saves figures. Imports matplotlib when the first figure is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reprise.errors import TrainerError

# Colors distinguishable with any common color blindness: M. Okabe and K. Ito, Color Universal Design, 2008. Their
# yellow is omitted because it is too light for a line on white. Lines also differ in style.
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
BASE_COLOR = "#b0b0b0"


def make_figure(*, width: float = 10, height: float = 7) -> Any:
    """Return an empty figure with a size in inches, 120 dots per inch, laid out without overlaps.

    Raises:
        TrainerError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainerError("A plot needs matplotlib", fix="Install it with: pip install matplotlib") from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def write_figure(figure: Any, path: str | Path) -> None:
    """Write a figure to a file. The suffix determines the format.

    Raises:
        TrainerError: The file cannot be written, or the format is not supported.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise TrainerError("Cannot write the plot", where=path, found=error) from error
