"""Write docs/options.md from the schema of the configuration: `python -m scripts.make_options`."""

from __future__ import annotations

from trainer.config.options import CONFIGS, Row, groups, sections

OUTPUT = CONFIGS.parent / "docs" / "options.md"

_HEAD = """\
# Options

<!-- Written by python -m scripts.make_options from the schema. -->

With this page you can set every key of the configuration. `reprise options KEY` describes a key, a section or a prefix.

A key is set as `SECTION.KEY=VALUE`, a group of keys by a file's name, as in
`reprise train parallel=zero3 checkpoint.save=null`. Keys win over `experiment=`, and that over other groups. `--cfg
job` prints the configuration of a command line.

A value is text, a number, `true`, `false`, `null`, a list `[a, b]` or a mapping `{a: 1}`, in
[Hydra's grammar](https://hydra.cc/docs/advanced/override_grammar/basic/). Only text with another meaning there needs
quotes, as in `"run.name='1,2'"`, not `data.path=语料/*`. A text key takes what
was typed, also in a file of `--config-dir`: `run.name=1.50` is no number. `${KEY}` is the value of another key
(`tests/unit/config/test_overrides.py`).

A default shows the type; of choices it is in bold.

## Groups

| group | choices |
|---|---|
"""
_TABLE = "| key | default | meaning |\n|---|---|---|\n"


def main() -> None:
    """Write the page and name its file."""
    OUTPUT.write_text(page(), encoding="utf-8")
    print(OUTPUT)


def page() -> str:
    """Return the page that the schema and the files of configs/ describe."""
    parts = [_HEAD + "".join(f"| `{group}=` | {', '.join(names)} |\n" for group, names in groups())]
    for section in sections():
        parts.append(f"## {section.name}\n\n{section.summary}\n\n{_TABLE}{''.join(map(_line, section.rows))}")
    return "\n".join(parts)


def _line(row: Row) -> str:
    meaning = row.meaning[0].upper() + row.meaning[1:] if row.meaning[0].isalpha() else row.meaning
    cells = (f"`{row.key}`", _default(row), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(row: Row) -> str:
    """Return the default of a key in a form that shows its type."""
    if row.default.startswith("by"):
        return f"{row.kind}, {row.default}"
    if row.kind.startswith("`"):
        return ", ".join(f"**{choice}**" if choice == row.default else choice for choice in row.kind.split(", "))
    if row.default == "below":
        return row.kind
    if row.default == "`null`":
        return f"{row.default}, {row.kind}"
    if row.default == "`[]`":
        return f"`[]`, {row.kind.removeprefix('list of ')}"
    alternative = row.kind.partition(" or ")[2]
    return f"{row.default} or {alternative}" if alternative else row.default


if __name__ == "__main__":
    main()
