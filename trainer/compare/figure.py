"""Creates and saves figures, with matplotlib, which is imported with the first figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reprise.errors import TrainerError

# Colours that people with any common kind of colour blindness tell apart: M. Okabe and K. Ito, Color Universal Design,
# 2008; its yellow is left out, which is too light for a line on white. Lines differ in style too.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
BASE_COLOUR = "#b0b0b0"


def make_figure(*, width: float = 10, height: float = 7) -> Any:
    """Return an empty figure of a size in inches, 120 dots each, with a layout free of overlaps.

    Raises:
        TrainerError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainerError(
            "A plot needs matplotlib", fix="Install it with: pip install 'torch-reprise[plot]'"
        ) from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def write_figure(figure: Any, path: str | Path) -> None:
    """Write a figure to a file whose suffix determines the format.

    Raises:
        TrainerError: the file cannot be written, or not in that format.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise TrainerError("Cannot write the plot", where=path, found=error) from error
