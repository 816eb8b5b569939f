"""The site of the documents, which `make docs` writes into the folder build/docs."""

from __future__ import annotations

import zlib
from pathlib import Path

from sphinx.application import Sphinx

import reprise

project = "Reprise"
release = reprise.__version__
html_title = f"Reprise {release}"
html_theme = "furo"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["inventories"]
nitpicky = True
# Parameters by which commands of the trainer pass their own words and file system to the library.
nitpick_ignore = [("py:class", "reprise.storage.files.Files"), ("py:class", "reprise.storage.folder.FolderTerms")]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may have sections without a level between

# A name between single backticks is code, as in Markdown.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

# A copied command line has no prompt and no output.
copybutton_prompt_text = "$ "


def inventory(name: str) -> str:
    """Return the path of an intersphinx inventory packed from `inventories/NAME.txt`, so that no build needs a network.

    Its lines are those of Sphinx's inventory, version 2: name, role, priority, address and title of each target.
    """
    text = (Path(__file__).parent / "inventories" / f"{name}.txt").read_bytes()
    header = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n"
    header += "# The remainder of this file is compressed using zlib.\n"
    path = Path(__file__).parents[1] / "build" / "inventories" / f"{name}.inv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.encode() + zlib.compress(text))
    return str(path)


intersphinx_mapping = {
    "python": ("https://docs.python.org/3", inventory("python")),
    "torch": ("https://docs.pytorch.org/docs/stable", inventory("torch")),
}


def mark_code(app: Sphinx, what: str, name: str, target: object, options: object, lines: list[str]) -> None:
    """Make a literal block of each indented paragraph of a docstring, as Markdown does."""
    for at in range(len(lines) - 1, 1, -1):
        if lines[at].startswith("    ") and not lines[at - 1] and not lines[at - 2].startswith(" "):
            lines[at:at] = ["::", ""]


def setup(app: Sphinx) -> None:
    """Connect the change of docstrings, before those of napoleon."""
    app.connect("autodoc-process-docstring", mark_code, priority=400)
