"""Fuzzing of all parsers of untrusted files: `python -m scripts.faults.fuzz_inputs`."""
