"""How much of the held-out text is in other documents of the data, which are then trained on
without it.

Documents that are held out are known by a hash of their text. That does not find the same text in
other documents: in one long file, with other white space, in a quotation. `gqa.corpus.passages`
finds it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gqa.checkpoint.write import replacing
from gqa.core.errors import plural
from gqa.corpus.encoders import Encoders
from gqa.corpus.exclusion import Exclusion
from gqa.corpus.reading_order import HeldoutDocuments
from gqa.corpus.rows import row_digest, searched_text
from gqa.corpus.sources import Source


@dataclass(frozen=True)
class Overlap:
    """How much of the held-out text is in other documents of the data.

    Attributes:
        documents: How many of the data, except exact copies of held-out ones, contain passages of
            held-out text.
        share: The share of the passages of held-out text that they contain.
        whole: Whether all held-out text was looked for.
    """

    documents: int
    share: float
    whole: bool = True

    def __str__(self) -> str:
        documents = plural(self.documents, "other document")
        text = (
            f"{self.share:.0%} of the held-out text is also in {documents} of the data, which "
            "train without it"
        )
        if self.whole:
            return text
        return f"{text} (of the beginning of the held-out text, which is large)"


def heldout_texts(
    sources: Sequence[Source], heldout: HeldoutDocuments, encoders: Encoders
) -> Iterator[str]:
    """The held-out texts of the documents of sources: whole ones, and the ends of others."""
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
    """Look up all documents of the data.

    The result is stored in the cache of `datasets`: a large data set takes minutes.
    """
    path = _cache_path(sources, exclusion, heldout)
    with suppress(OSError, ValueError, TypeError):  # it is not there, or damaged
        return Overlap(**json.loads(path.read_text()))

    overlap = _count_overlap(sources, exclusion, heldout, encoders)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(asdict(overlap)))
    return overlap


def _cache_path(sources: Sequence[Source], exclusion: Exclusion, heldout: HeldoutDocuments) -> Path:
    """Where the overlap of this data with this held-out text is stored."""
    from datasets.config import HF_DATASETS_CACHE

    limits = sorted((digest.hex(), limit) for digest, limit in heldout.limits.items())
    key = f"{[source.identify() for source in sources]} {exclusion.identity} {limits}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    return Path(HF_DATASETS_CACHE) / "gqa-overlap" / f"{digest}.json"


def _count_overlap(
    sources: Sequence[Source], exclusion: Exclusion, heldout: HeldoutDocuments, encoders: Encoders
) -> Overlap:
    passages = exclusion.passages
    documents = 0
    is_repeated = np.zeros(len(passages.hashes), bool)  # by passage of the held-out text
    for source in sources:
        for row in source.rows():
            limit = heldout.limits.get(row_digest(*row))
            if limit == 0:  # all of it is held out
                continue

            trained = row if limit is None else (encoders.text.beginning(row[0], limit),)
            numbers = passages.found_in(searched_text(trained))
            if len(numbers) or exclusion.remainder(trained) != [trained]:
                documents += 1
                is_repeated[numbers] = True

    share = float(is_repeated.mean()) if len(is_repeated) else 0.0
    return Overlap(documents, share, passages.whole)
