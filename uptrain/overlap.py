"""How much of the validation text is in other documents of the data.

It is cut out of text. Pairs and chats are left out if at least half of one is validation text, and
are else trained on whole (`Exclusion`).

Documents that are held out are known by a hash of their text. That does not find the same text in
other documents: in one long file, with other white space, in a quotation. `gqa.corpus.passages`
finds it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gqa.checkpoint.write import replacing
from gqa.core.errors import plural
from gqa.corpus.encoders import Encoders
from gqa.corpus.exclusion import SEARCH_VERSION, Exclusion
from gqa.corpus.reading_order import HeldoutDocuments
from gqa.corpus.rows import row_digest, searched_text
from gqa.corpus.sources import Source


@dataclass(frozen=True)
class Overlap:
    """How much of the validation text is in other documents of the data.

    Exact copies of validation documents count nowhere.

    Attributes:
        documents: How many of the data are cut or left out, as they contain passages of validation
            text.
        share: The share of the passages of validation text that these contain.
        kept_whole: How many contain passages, too, but are trained on whole: pairs and chats.
        searched_all: Whether all validation text was looked for, not only its beginning.
    """

    documents: int
    share: float
    kept_whole: int
    searched_all: bool = True

    @property
    def was_found(self) -> bool:
        """Whether any document contains passages."""
        return bool(self.documents or self.kept_whole)

    def __str__(self) -> str:
        text = "nothing"
        if self.documents:
            documents = plural(self.documents, "other document")
            text = (
                f"{self.share:.0%} of the validation text is also in {documents} of the data, and "
                "is not trained on there"
            )
        if not self.searched_all:
            text += " (of the beginning of the validation text, which is large)"
        if self.kept_whole:
            text += (
                f"; trained on whole: {plural(self.kept_whole, 'document')} with little of the "
                "validation text, less than half of each"
            )
        return text


def validation_texts(
    sources: Sequence[Source], heldout: HeldoutDocuments, encoders: Encoders
) -> list[str]:
    """The validation texts of the documents of sources: whole ones, and the ends of others.

    All documents are read to find these few, so they are stored (`_from_cache`).
    """
    key = f"texts {_key(sources, heldout)}"
    if any(heldout.limits.values()):  # where the end of a text begins depends on the tokens
        key += f" {encoders.text.identify()}"
    texts: list[str] = _from_cache(key, lambda: [*_find_texts(sources, heldout, encoders)])
    return texts


def _find_texts(
    sources: Sequence[Source], heldout: HeldoutDocuments, encoders: Encoders
) -> Iterator[str]:
    """`validation_texts`, in the order in which they are read, each once."""
    seen = set[bytes]()
    for source in sources:
        for row in source.rows():
            digest = row_digest(*row)
            if digest not in heldout.limits or digest in seen:
                continue
            seen.add(digest)

            text = searched_text(row)
            limit = heldout.limits[digest]
            start = len(encoders.text.beginning(text, limit)) if limit else 0
            yield text[start:]


def find_overlap(
    sources: Sequence[Source], exclusion: Exclusion, heldout: HeldoutDocuments, encoders: Encoders
) -> Overlap:
    """Look up all documents of the data. The result is stored (`_from_cache`)."""
    key = f"overlap {_key(sources, heldout)} {exclusion.identity}"
    values = _from_cache(key, lambda: asdict(_count_overlap(sources, exclusion, heldout, encoders)))
    return Overlap(**values)


def _key(sources: Sequence[Source], heldout: HeldoutDocuments) -> str:
    """What determines the documents, and which of them are held out."""
    limits = sorted((digest.hex(), limit) for digest, limit in heldout.limits.items())
    return f"{[source.identify() for source in sources]} {limits}"


def _from_cache(key: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, a JSON value, or what an earlier run has stored of it in the cache of
    `datasets`: to read all documents of a large data set takes minutes.

    key: All that the value depends on.
    """
    from datasets.config import HF_DATASETS_CACHE

    digest = hashlib.sha256(f"{SEARCH_VERSION} {key}".encode()).hexdigest()[:32]
    path = Path(HF_DATASETS_CACHE) / "gqa-overlap" / f"{digest}.json"
    with suppress(OSError, ValueError):  # it is not there, or damaged
        return json.loads(path.read_text())

    value = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value))
    return value


def _count_overlap(
    sources: Sequence[Source], exclusion: Exclusion, heldout: HeldoutDocuments, encoders: Encoders
) -> Overlap:
    """Read every document of the data and look for passages of the validation text in it."""
    passages = exclusion.passages
    documents = 0
    kept_whole = 0
    is_repeated = np.zeros(len(passages.hashes), bool)  # by passage, in the order of `hashes`
    for source in sources:
        for row in source.rows():
            limit = heldout.limits.get(row_digest(*row))
            if limit == 0:  # all of it is held out
                continue

            trained = row if limit is None else (encoders.text.beginning(row[0], limit),)
            found = passages.found_in(searched_text(trained))  # their numbers in `hashes`
            if exclusion.remainder(trained) != [trained]:
                documents += 1
                is_repeated[found] = True
            elif len(found):
                kept_whole += 1

    share = float(is_repeated.mean()) if len(is_repeated) else 0.0
    return Overlap(documents, share, kept_whole, passages.has_all_text)
