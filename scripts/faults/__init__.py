"""Fault injection: random kills, power cuts, hostile files."""
