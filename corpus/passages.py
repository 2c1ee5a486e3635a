"""Passages of held-out text, to find them again in other text, however that is cut into documents
and formatted.

A passage is LENGTH letters and digits in a row; case, white space and symbols do not count, as in
GPT-4's check for contamination (arXiv 2303.08774, appendix C). Unlike words, letters are the same
in code, in Chinese and in a table.

Only the held-out text, which is small, is in memory: a 64-bit hash of each of its passages. Other
text is looked up. Rewritten and translated text is not found, nor are passages that are shorter.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LENGTH = 50  # letters and digits: about ten English words
MOST = 1 << 24  # passages of held-out text that are hashed: 128 MiB

_SYMBOLS = re.compile(r"[\W_]+")
_CHUNK = 1 << 20  # letters that are hashed at a time
_FILTER_BITS = 24
# Odd numbers, so that products modulo 2^64 lose nothing
_BASE = 0x9E3779B97F4A7C15
_SPREAD = 0xBF58476D1CE4E5B9
_MIX = 0x94D049BB133111EB

Hashes = NDArray[np.uint64]
Codes = NDArray[np.uint32]


def letters_of(text: str) -> str:
    """The letters and digits of a text, case-folded."""
    return _SYMBOLS.sub("", text.casefold())


@dataclass(frozen=True, eq=False)
class Passages:
    """The passages of held-out text.

    Attributes:
        hashes: Sorted and unique.
        short: The letters of texts with less than LENGTH, which are found as whole documents.
        has_all_text: Whether all passages of the text are in `hashes`, which has at most MOST.
        identity: A hash of the text.
        _filter: (2^_FILTER_BITS,) whether any of `hashes` has these upper bits.
    """

    hashes: Hashes
    short: frozenset[str]
    has_all_text: bool
    identity: str
    _filter: NDArray[np.bool_]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Passages:
        """The passages of texts."""
        parts = list[Hashes]()
        short = set[str]()
        count = 0
        digest = hashlib.sha256()
        has_all_text = True

        for text in texts:
            letters = letters_of(text)
            digest.update(letters.encode() + b"\0")
            if len(letters) < LENGTH:
                short.add(letters)
                continue

            hashes = _sorted_unique(_hashes(_codes(letters)))
            has_all_text = has_all_text and count + len(hashes) <= MOST
            parts.append(hashes[: max(MOST - count, 0)])
            count += len(parts[-1])

        hashes = _sorted_unique(np.concatenate([np.zeros(0, np.uint64), *parts]))
        present = np.zeros(1 << _FILTER_BITS, bool)
        present[_filter_index(hashes)] = True
        return cls(hashes, frozenset(short), has_all_text, digest.hexdigest(), present)

    def found_in(self, text: str) -> NDArray[np.int64]:
        """The numbers, in `hashes`, of the passages that occur in a text, with repetitions."""
        hashes = _hashes(_codes(letters_of(text)))
        return np.searchsorted(self.hashes, hashes[self._contain(hashes)])

    def share(self, text: str) -> float:
        """The share of the letters of a text that are in passages; 1 for a short text that is held
        out as a whole.
        """
        letters = letters_of(text)
        if len(letters) < LENGTH:
            return float(letters in self.short)
        return float(self._covered(letters).mean())

    def remove_from(self, text: str) -> list[str]:
        """What is left of a text without these passages: pieces of at least LENGTH letters.

        The text itself, if it has none of them.
        """
        letters = letters_of(text)
        if len(letters) < LENGTH:
            return [] if letters in self.short else [text]

        covered = self._covered(letters)
        if not covered.any():
            return [text]

        # By letter, the character of the text that it comes from: a character may be several
        # letters, case-folded
        origin = list[int]()
        for place, character in enumerate(text):
            origin += [place] * len(letters_of(character))

        # Letters outside of passages: where each run of them begins and ends
        is_outside = np.concatenate([[False], ~covered, [False]])
        begins_and_ends = np.flatnonzero(is_outside[1:] != is_outside[:-1])
        pieces = []
        for begin, end in begins_and_ends.reshape(-1, 2).tolist():
            if end - begin >= LENGTH:
                # What stands before the first letter and after the last belongs to the outer pieces
                first = origin[begin] if begin else 0
                last = origin[end - 1] + 1 if end < len(letters) else len(text)
                pieces.append(text[first:last])
        return pieces

    def _covered(self, letters: str) -> NDArray[np.bool_]:
        """(n,) whether each of n letters is in a passage."""
        starts = np.flatnonzero(self._contain(_hashes(_codes(letters))))
        changes = np.zeros(len(letters) + 1, np.int64)
        np.add.at(changes, starts, 1)
        np.add.at(changes, starts + LENGTH, -1)
        return np.cumsum(changes[:-1]) > 0

    def _contain(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Whether each hash is one of `hashes`: most are ruled out by one look into a table."""
        result = self._filter[_filter_index(hashes)]
        candidates = np.flatnonzero(result)
        if not len(self.hashes):
            return result
        wanted = hashes[candidates]
        places = np.searchsorted(self.hashes, wanted).clip(max=len(self.hashes) - 1)
        result[candidates] = self.hashes[places] == wanted
        return result


def _sorted_unique(hashes: Hashes) -> Hashes:
    """As `np.unique`, whose hash table is a hundred times slower for such numbers (numpy 2.3)."""
    ordered = np.sort(hashes)
    if not len(ordered):
        return ordered
    is_first = np.ones(len(ordered), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    unique: Hashes = ordered[is_first]
    return unique


def _codes(letters: str) -> Codes:
    """The code points (n,) of letters."""
    return np.frombuffer(letters.encode("utf-32-le", "surrogatepass"), np.uint32)


def _filter_index(hashes: Hashes) -> Hashes:
    """Where hashes are in the table of `Passages`: their upper bits."""
    return hashes >> np.uint64(64 - _FILTER_BITS)


_POWERS = np.full(_CHUNK + LENGTH, _BASE, np.uint64).cumprod()
_INVERSE_POWERS = np.full(_CHUNK + LENGTH, pow(_BASE, -1, 1 << 64), np.uint64).cumprod()


def _hashes(codes: Codes) -> Hashes:
    """(n,) letters -> (n - LENGTH + 1,) hashes of all passages; (0,) of fewer letters.

    A passage is a polynomial in _BASE modulo 2^64, with its letters as coefficients. With prefix
    sums of all letters times their powers, that of passage i is
    (prefix[i + LENGTH] - prefix[i]) / _BASE^i, so equal passages are equal wherever they stand.
    """
    parts = [np.zeros(0, np.uint64)]
    for begin in range(0, len(codes) - LENGTH + 1, _CHUNK):
        values = codes[begin : begin + _CHUNK + LENGTH - 1].astype(np.uint64) * np.uint64(_SPREAD)
        sums = np.cumsum(values * _POWERS[: len(values)])
        prefix = np.concatenate([np.zeros(1, np.uint64), sums])
        hashes = (prefix[LENGTH:] - prefix[:-LENGTH]) * _INVERSE_POWERS[: len(values) - LENGTH + 1]
        hashes ^= hashes >> np.uint64(31)
        parts.append(hashes * np.uint64(_MIX))
    return np.concatenate(parts)
