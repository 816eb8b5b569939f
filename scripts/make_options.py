"""Write docs/options.md from the schema of the configuration: `python -m scripts.make_options`."""

from __future__ import annotations

from trainer.config.options import CONFIGS, Row, groups, sections

OUTPUT = CONFIGS.parent / "docs" / "options.md"

_HEAD = """\
# Options

<!-- Written by python -m scripts.make_options from the schema. -->

With this page you can set every key of the configuration. `reprise options KEY` describes a key, a section or a prefix.

A key is set as `SECTION.KEY=VALUE`, a group of keys by the name of a file, as in
`reprise train parallel=zero3 checkpoint.save=null`. Keys win over an `experiment=`, and that over other groups. `--cfg
job` prints the configuration of a command line.

A value is text, a number, `true`, `false`, `null`, a list `[a, b]` or a mapping `{a: 1}`, in
[Hydra's grammar](https://hydra.cc/docs/advanced/override_grammar/basic/). Text that this grammar refuses needs no
quotes of its own, as in `data.path=语料/*`. Text with another meaning in it does, as in `"run.name='1,2'"`. `${KEY}` is
the value of another key (`tests/unit/config/test_overrides.py`). A key whose default is `null` may be null.

## Groups

| group | choices, the default in bold |
|---|---|
"""
_TABLE = "| key | type | default | meaning |\n|---|---|---|---|\n"


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
    cells = (f"`{row.key}`", row.kind, row.default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    main()
