"""Builds what DeepSpeed compiles when it starts, once and without a deadline, in a folder of the tests' own.

While torch builds an extension, a file `lock` lies in the extension's folder, and other processes wait for its end. A
process that is killed leaves it there. In the user's cache that stops every later DeepSpeed process. Here the kernel's
own lock, which ends with its process, says whether another run of the tests uses the folder.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

# Kept from one run of the tests to the next, and removed with the virtual environment.
FOLDER = Path(sys.prefix) / "build" / "torch_extensions"
COMMAND = (sys.executable, "-c", "from deepspeed.comm.torch import build_shm_op; build_shm_op()")


@contextmanager
def built_extensions(folder: Path = FOLDER, command: Sequence[str] = COMMAND) -> Iterator[Mapping[str, str]]:
    """Build, and give the environment in which DeepSpeed finds what was built, for as long as it is used.

    Raises:
        CalledProcessError: if the build fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"TORCH_EXTENSIONS_DIR": str(folder), "DS_ACCELERATOR": "cpu"}
    with (folder / "used").open("w") as used:
        fcntl.flock(used, fcntl.LOCK_EX)
        for left in folder.rglob("lock"):  # whoever made it is dead: nobody else has this folder now
            left.unlink()
        subprocess.run(command, env={**os.environ, **environment}, check=True)
        fcntl.flock(used, fcntl.LOCK_SH)
        yield environment
