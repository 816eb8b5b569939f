"""The text of docs/support.md."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.tables.runs import (
    ALL_PAIRS,
    NO_SAVE,
    SAVE_AGAIN,
    SAVED,
    STEPS,
    TOPOLOGIES,
    VARIANTS,
    ModelVariant,
    NamedTopology,
    Results,
    Resumed,
    pairs,
    resume_keys,
    straight_keys,
)

# The runs of the page are those of the shell variables that its reader sets.
_VARIANT = ModelVariant("${family}", "$dtype")
_SOURCE, _TARGET = NamedTopology("$source", 0, ()), NamedTopology("$target", 0, ())

_HEAD = f"""\
# Resumes from topology to topology

With this page you can look up the losses after a load at another topology, by family and dtype, and repeat any of these
runs. `make tables` generates the page in some minutes on a CPU. [topologies.md](topologies.md) describes the
topologies, and [parallelism.md](parallelism.md#differences-after-resharding) bounds the differences.

A run at the source topology trains {SAVED + STEPS[-1]} iterations and saves at iteration {SAVED}: the row *straight*.
A run at the target topology loads this save and trains the last {STEPS[-1]} iterations. Topologies with equal losses
share a row.

* **step {STEPS[0]}**, **step {STEPS[1]}**, **step {STEPS[2]}**: the loss so many iterations after the save, with all
  digits: *=* if it is that of the straight run, else with the difference in parentheses. Another topology adds over
  its ranks in another order, so the last bits may differ. With `parallel.invariant_ranks`, which these runs do not
  set, they are equal wherever tp and sequence parallelism are
  ([parallelism.md](parallelism.md#equal-bits-across-topologies)).
* **bitwise loads** (in the summary): the target saves again right after the load. A load is bitwise if the tensor files
  of both saves, weights and moments, are equal byte for byte. Any other load is marked at its target.

The dtype is `train.dtype`, that of activations; weights and moments are float32. The models are the tiny presets,
without dropout. The data is Python's standard library, and bits of losses depend on the CPU and on the versions of
torch and Python.

All pairs of topologies are here for {ALL_PAIRS.family} in {ALL_PAIRS.dtype}, and for the other families and dtypes
those with `single` or `tp2_pp2` as source or target.

## Commands

| topology | command |
|---|---|
"""

_COMMANDS = f"""
To repeat a run, set `family`, `dtype`, `source` and `target` to names of its row. The straight run is the command of
the source with

```
{" ".join(straight_keys(_VARIANT, _SOURCE))}
```

and the resume is the command of the target with

```
{" ".join(resume_keys(_VARIANT, _SOURCE, _TARGET))}
```

For *bitwise loads*, resume with `{SAVE_AGAIN}` in place of `{NO_SAVE}`, and a `run.dir` of its own.
"""

_SUMMARY = """\

## Summary

*equal* counts the pairs whose loss has the bits of the straight run. The differences are the largest, absolute.

"""


def page(results: Results) -> str:
    """Return the page with these results, which are those of all variants and pairs."""
    parts = [_HEAD]
    parts += [_row([f"`{topology.name}`", f"`{topology.command(topology.keys)}`"]) for topology in TOPOLOGIES]
    parts += [_COMMANDS, _SUMMARY]
    steps = [f"{word}, step {step}" for step in STEPS for word in ("equal", "difference")]
    parts += _heading(["family", "dtype", "pairs", "bitwise loads", *steps])
    parts += [_row(_summary(variant, results)) for variant in VARIANTS]
    for variant in VARIANTS:
        parts += [f"\n## {variant.family}, {variant.dtype}\n\n"]
        parts += _heading(["source", "target", *(f"step {step}" for step in STEPS)])
        parts += [_row(row) for row in _rows(variant, results)]
    return "".join(parts)


def _heading(cells: list[str]) -> list[str]:
    return [_row(cells), "|" + "---|" * len(cells) + "\n"]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _summary(variant: ModelVariant, results: Results) -> list[str]:
    runs_of_pairs = [
        (results.straight[variant, s.name], results.resumed[variant, s.name, t.name]) for s, t in pairs(variant)
    ]
    bitwise = sum(resumed.is_bitwise for _, resumed in runs_of_pairs)
    cells = [variant.family, variant.dtype, str(len(runs_of_pairs)), str(bitwise)]
    for step in range(len(STEPS)):
        differences = [abs(resumed.losses[step] - straight[step]) for straight, resumed in runs_of_pairs]
        cells += [str(differences.count(0.0)), f"{max(differences):.1e}"]
    return cells


def _rows(variant: ModelVariant, results: Results) -> Iterator[list[str]]:
    """Yield the rows of a variant: of each source, the straight run and then its resumes; equal rows are merged."""
    sources = dict[tuple[tuple[str, ...], ...], list[str]]()
    for source in TOPOLOGIES:
        sources.setdefault(tuple(_rows_of_source(variant, source, results)), []).append(f"`{source.name}`")
    for rows, names in sources.items():
        yield from ([", ".join(names), *row] for row in rows)


def _rows_of_source(variant: ModelVariant, source: NamedTopology, results: Results) -> Iterator[tuple[str, ...]]:
    straight = results.straight[variant, source.name]
    yield "straight", *map(repr, straight)
    targets = dict[tuple[str, ...], list[str]]()
    for target in (target for origin, target in pairs(variant) if origin == source):
        resumed = results.resumed[variant, source.name, target.name]
        name = f"`{target.name}`" if resumed.is_bitwise else f"`{target.name}` **(other bytes)**"
        targets.setdefault(tuple(_losses(resumed, straight)), []).append(name)
    for losses, names in targets.items():
        yield ", ".join(names), *losses


def _losses(resumed: Resumed, straight: tuple[float, ...]) -> Iterator[str]:
    for loss, expected in zip(resumed.losses, straight, strict=True):
        yield "=" if loss == expected else f"{loss!r} ({loss - expected:+.1e})"
