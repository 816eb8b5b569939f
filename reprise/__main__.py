"""The `reprise` command: puts the application (the trainer and its tools) on the path and runs it.

The installed library keeps the application in its own folder, because site-packages has no `trainer` or `models`
package. In a checkout, also an editable install, the application is next to this package.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

_LIBRARY = Path(__file__).resolve().parent


def main() -> int:
    """Run the command line's subcommand, and return the exit status."""
    installed = _LIBRARY / "_application"
    # First: PYTHONPATH and the working directory may hold the user's packages with the same names.
    sys.path.insert(0, str(installed if installed.is_dir() else _LIBRARY.parent))
    status: int = import_module("trainer.commands.main").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
