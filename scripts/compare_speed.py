"""The command `reprise compare-speed`, from a checkout."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "compare-speed")
    runpy.run_module("reprise", run_name="__main__")
