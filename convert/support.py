"""What can be converted, and how: the families as text, which `--families` prints and docs/models.md shows."""

import textwrap
from collections import defaultdict
from collections.abc import Iterator

from gqa.convert.heads.families.refused import REFUSED
from gqa.convert.heads.families.table import FAMILIES, NESTED
from gqa.convert.recast.targets import RECASTINGS

_PAGE = """# Models

How heads are stored, which model types, and what is refused and why. `--method procrustes`, `aligned` and `calibrated`
align the heads of all model types but those that a note excepts; `refined` trains the heads of those unaligned.
`calibrated` and `refined` run layers one by one, where no note says that it cannot be done; of models that are given
sound (Whisper) on recordings.
`gqa-convert --families` prints the same; `python tests/test_structure.py` writes this page.

| how heads are stored | model types | note |
|---|---|---|
"""


def families_text() -> str:
    """Every family with its model types, wrapped for a terminal."""
    parts = []
    for title, names, note in _rows():
        wrapped = textwrap.fill(names, 110, initial_indent="    ", subsequent_indent="    ")
        parts.append(f"{title}{f' ({note})' if note else ''}\n{wrapped}")
    return "\n\n".join(parts)


def models_page() -> str:
    """docs/models.md: the same as a Markdown table, in whose cells a bar would end the cell."""
    rows = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in _rows())
    return _PAGE + "".join(f"| {row} |\n" for row in rows)


def _rows() -> Iterator[tuple[str, str, str]]:
    """(how heads are stored, model types, note)."""
    for family in FAMILIES:
        notes, reasons = [family.note] if family.note else [], defaultdict(list)
        for name, found in family.symmetries.items():  # why the heads of which types cannot be aligned
            if why := found if isinstance(found, str) else found.unless and found.unless[0]:
                reasons[why].append(name)
        notes += [f"not aligned: {', '.join(names)} ({why})" for why, names in reasons.items()]
        layerwise = defaultdict(list)
        for name, why in family.not_layerwise.items():
            layerwise[why].append(name)
        notes += [f"neither calibrated nor refined: {', '.join(names)} ({why})" for why, names in layerwise.items()]
        yield family.name, ", ".join(sorted(family.model_types)), "; ".join(notes)
    yield "text part of a larger model", ", ".join(sorted(NESTED)), "towers are left alone"
    for recasting in RECASTINGS:
        which = f"{recasting.source}: {recasting.which}" if recasting.which else recasting.source
        note = f"G: {recasting.groups}" + (f"; {recasting.note}" if recasting.note else "")
        yield f"written as {recasting.target}, {recasting.way}", which, note
    for reason in dict.fromkeys(REFUSED.values()):
        yield "refused", ", ".join(sorted(name for name, why in REFUSED.items() if why == reason)), reason
