"""Fuzzing of everything that is read from files of strangers: `python -m scripts.faults.fuzz_inputs`."""
