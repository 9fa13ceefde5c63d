"""The configuration as text for people: every key of the resolved tree with its meaning, and the table in the docs."""

from __future__ import annotations

from pathlib import Path

from pekoe.pipeline.config.emit import yaml_lines, yaml_value
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.schema import Key, all_keys

WIDEST_KEY = 48
"""Column of the comments; a longer line has its comment right after it."""

BEGIN, END = "<!-- keys: generated -->", "<!-- keys: end -->"


def show(config: RunConfig) -> str:
    """YAML that loads to an equal configuration: a line per key, its value and its meaning in an aligned comment."""
    lines = list(yaml_lines(config))
    width = min(max(len(line) for line, _ in lines), WIDEST_KEY)
    return "".join(f"{line:<{width}}  # {key.meaning}\n" for line, key in lines)


def key_table() -> str:
    """Every key as Markdown, a table per section: name, default, allowed values, meaning. The docs hold this."""
    sections: dict[str, list[Key]] = {"": []}
    meanings = {"": "the run"}
    for key in all_keys():
        if key.is_section:
            sections[key.name] = []
            meanings[key.name] = key.meaning + ("; null unless given" if key.nullable and key.default is None else "")
        sections[key.name.rpartition(".")[0]].append(key)
    blocks = []
    for name, keys in sections.items():
        rows = [key for key in keys if not key.is_section]
        title = f"#### `{name}`: {meanings[name]}" if name else "#### The top level"
        head = ["| key | default | allowed | meaning |", "| --- | --- | --- | --- |"]
        blocks.append("\n".join([title, "", *head, *map(_row, rows)]))
    return "\n\n".join(blocks)


def _row(key: Key) -> str:
    cells = (f"`{key.name}`", f"`{yaml_value(key.default)}`", key.allowed, key.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def refresh_docs(path: Path) -> bool:
    """Puts the current key table between the marks in a Markdown file; True if that changed it."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: lacks the marks {BEGIN} and {END}")
    fresh = f"{before}{BEGIN}\n\n{key_table()}\n\n{END}{after}"
    if fresh != text:
        path.write_text(fresh, encoding="utf-8")
    return fresh != text


if __name__ == "__main__":
    import sys

    for name in sys.argv[1:]:
        print(f"{name}: {'refreshed' if refresh_docs(Path(name)) else 'up to date'}")
