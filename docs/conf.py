"""The site of the documents, which `make docs` writes into the folder build/docs."""

from __future__ import annotations

from sphinx.application import Sphinx

import reprise

project = "Reprise"
release = reprise.__version__
html_title = f"Reprise {release}"
html_theme = "furo"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may have sections without a level between

# A name between single backticks is code, as in Markdown.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"


def mark_code(app: Sphinx, what: str, name: str, target: object, options: object, lines: list[str]) -> None:
    """Make a literal block of each indented paragraph of a docstring, as Markdown does."""
    for at in range(len(lines) - 1, 1, -1):
        if lines[at].startswith("    ") and not lines[at - 1] and not lines[at - 2].startswith(" "):
            lines[at:at] = ["::", ""]


def setup(app: Sphinx) -> None:
    """Connect the change of docstrings, before those of napoleon."""
    app.connect("autodoc-process-docstring", mark_code, priority=400)
