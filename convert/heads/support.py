"""The families table as text: what `--families` prints and the README shows."""

from __future__ import annotations

from collections.abc import Iterator

from gqa.convert.heads.families import FAMILIES, NESTED
from gqa.convert.heads.refused import REFUSED
from gqa.convert.recast.parts import Recasting
from gqa.convert.recast.targets import RECASTINGS


def families_text() -> str:
    """Every family with its model types, wrapped for a terminal."""
    import textwrap

    def entry(title: str, names: str) -> str:
        return title + "\n" + textwrap.fill(names, 110, initial_indent="    ", subsequent_indent="    ")

    parts = [entry(f.name + (f" ({f.note})" if f.note else ""), ", ".join(sorted(f.model_types))) for f in FAMILIES]
    parts.append(entry("models whose text part is one of these", ", ".join(sorted(NESTED))))
    parts += [entry(f"written as {r.target}, {r.way} ({_told(r)})", _source(r, r.source)) for r in RECASTINGS]
    parts += [entry(f"refused: {reason}", ", ".join(names)) for reason, names in _refused()]
    return "\n\n".join(parts)


def families_markdown() -> str:
    """The same as a Markdown table."""
    rows = ["| how heads are stored | model types | note |", "|---|---|---|"]
    rows += [f"| {f.name} | {_code(f.model_types)} | {f.note} |" for f in FAMILIES]
    rows.append(f"| text part of a larger model | {_code(tuple(NESTED))} | towers are left alone |")
    rows += [f"| written as `{r.target}`, {r.way} | {_source(r, f'`{r.source}`')} | {_told(r)} |" for r in RECASTINGS]
    rows += [f"| refused | {_code(names)} | {reason} |" for reason, names in _refused()]
    return "\n".join(rows)


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _source(recasting: Recasting, name: str) -> str:
    return f"{name}: {recasting.which}" if recasting.which else name


def _told(recasting: Recasting) -> str:
    return f"G: {recasting.groups}" + (f"; {recasting.note}" if recasting.note else "")


def _refused() -> Iterator[tuple[str, tuple[str, ...]]]:
    for reason in dict.fromkeys(REFUSED.values()):
        yield reason, tuple(sorted(name for name, why in REFUSED.items() if why == reason))
