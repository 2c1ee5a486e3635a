"""What can be converted, and how: the rows of docs/models.md."""

from collections import defaultdict
from collections.abc import Iterator

from gqa.convert.heads.families.refused import REFUSED
from gqa.convert.heads.families.table import FAMILIES, NESTED
from gqa.convert.recast.targets import RECASTINGS


def family_rows() -> Iterator[tuple[str, str, str]]:
    """(how heads are stored, model types, note) of every family."""
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
