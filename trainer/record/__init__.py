"""The part of a checkpoint that says which run saved it, and the rules for one that differs."""
