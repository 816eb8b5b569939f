"""The record of the run in its checkpoint, and the rules for a resume by another run."""
