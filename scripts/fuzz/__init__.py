"""Fuzzing of everything that is read from files of strangers: `python -m scripts.fuzz_inputs`."""
