"""The command `reprise compare-loss`, from a checkout."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "compare-loss")
    runpy.run_module("reprise", run_name="__main__")
