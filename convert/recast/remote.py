"""Models that stay what they are but for the attention class, which travels with the checkpoint as remote code.

Every entry is exact, for any G: with as many heads as before the classes of `modelling/` give the source's logits.
`tests/test_remote_code.py` holds every entry against the source's class.
"""

from __future__ import annotations

from typing import Any

from gqa.checkpoint.custom_code import PREFIX, auto_map, file_of
from gqa.convert.heads.custom_families import REMOTE_FAMILIES, query_heads
from gqa.convert.recast.recasting import REMOTE_CODE, Recasting

_WHICH = {
    "gpt2": "GPT-2, Cerebras-GPT, DialoGPT, distilgpt2",
    "m2m_100": "M2M-100, NLLB",
    "t5": "T5, Flan-T5",
}


# Masks that GPT-2 and GPT-Neo once stored, of which no class knows any more.
_MASKS = ("*.attn.bias", "*.attn.masked_bias", "*.attn.attention.bias", "*.attn.attention.masked_bias")


def _travelling(source: str, note: str) -> Recasting:
    target = PREFIX + source

    def config(config: Any) -> dict[str, Any]:
        return {"num_key_value_heads": query_heads(config), "auto_map": auto_map(target)}

    return Recasting(
        source, target, None, config, which=_WHICH.get(source, ""), note=note, way=REMOTE_CODE,
        dropped=_MASKS, files=lambda: dict([file_of(target)]),
    )  # fmt: skip


REMOTE: tuple[Recasting, ...] = tuple(
    _travelling(model_type.removeprefix(PREFIX), family.note)
    for family in REMOTE_FAMILIES
    for model_type in family.model_types
)
