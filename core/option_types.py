"""The types of options: numbers within bounds, amounts with units, choices, names and lists.

Each converts what the command line or a Python caller passes, or fails with a message that says
what is allowed. Imports no torch.
"""

import math
import operator
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

import click

# Units of numbers of tokens, and of sizes in bytes.
_COUNTS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "B": 10**9,
    "T": 10**12,
}
_SIZES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
# Words of bounds -> what a number within them satisfies.
_COMPARE = {
    "from": operator.ge,
    "above": operator.gt,
    "to": operator.le,
    "below": operator.lt,
}


class Number(click.ParamType[Any]):
    """A finite number within bounds.

    Args:
        python_type: `int` or `float`.
        bounds: The bounds in words, like `from 1 to 8` or `above 0 below 1`.
    """

    name = "number"

    def __init__(self, python_type: type, bounds: str = "") -> None:
        words = bounds.split()
        pairs = zip(words[::2], words[1::2], strict=True)
        self._bounds = [(_COMPARE[word], float(bound)) for word, bound in pairs]
        self._python_type = python_type
        noun = "whole number" if python_type is int else "number"
        self._allowed = _bounds_text(noun, words)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = value
        if isinstance(value, str):
            with suppress(ValueError):
                number = self._python_type(value)
        if not self._contains(number):
            self.fail(f"{value!r} is not a {self._allowed}", param, ctx)
        return self._python_type(number)

    def _contains(self, number: Any) -> bool:
        """Whether a value is a finite number of this type, within the bounds."""
        python_types = (int,) if self._python_type is int else (int, float)
        if not isinstance(number, python_types) or isinstance(number, bool):
            return False
        return abs(number) < math.inf and all(holds(number, bound) for holds, bound in self._bounds)


def _bounds_text(noun: str, words: Sequence[str]) -> str:
    """`number above 0 and at most 1,000`, of `above 0 to 1000`."""
    bounds = []
    for word, bound in zip(words[::2], words[1::2], strict=True):
        limit = f"{int(bound):,}" if bound.isdigit() else bound
        bounds.append(f"{word} {limit}")

    is_range = words[:1] == ["from"]  # `from 1 to 8` reads as it is
    if is_range:
        return " ".join([noun, *bounds])
    text = " and ".join(bounds)
    return " ".join([noun, text.replace("and to", "and at most")]).rstrip()


LARGEST = 10**9  # of what is counted one by one
COUNT = Number(int, f"from 1 to {LARGEST}")
SEED = Number(int, f"from 0 to {2**31 - 1}")
POSITIVE = Number(float, f"above 0 to {LARGEST}")
FROM_ZERO = Number(float, f"from 0 to {LARGEST}")
SHARE = Number(float, "from 0 to 1")


class OneOf(click.Choice[str]):
    """One of several words. A mistyped one is answered with the word that is most like it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word. Raises BadParameter for another one."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            message = f"{value!r} is not one of {', '.join(self.choices)}"
            similar = get_close_matches(str(value), self.choices, n=1)
            if similar:
                message += f"; did you mean {similar[0]}?"
            raise click.BadParameter(message, ctx, param) from error


class Amount(click.ParamType[int]):
    """`64K`, `1.5GB`: a whole number, up to 10^15.

    Args:
        units: Factors by the letters that may follow the number.
        allowed: What is allowed, in words, for the error.
        least: The least allowed number.
        rounds: Whether fractions of one are rounded down, as in sizes: 79.6GiB is no whole number
            of bytes. Otherwise they are refused.
    """

    name = "amount"

    def __init__(
        self, units: Mapping[str, int], allowed: str, least: int = 1, rounds: bool = False
    ) -> None:
        self._units = units
        self._allowed = allowed
        self._least = least
        self._rounds = rounds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        amount = None
        if not isinstance(value, bool | float):
            amount = read_amount(str(value), self._units, self._rounds)
        if amount is None or not self._least <= amount <= 10**15:
            self.fail(f"{value!r} is not a {self._allowed}", param, ctx)
        return amount


def read_amount(text: str, units: Mapping[str, int] = _COUNTS, rounds: bool = False) -> int | None:
    """A number like 65536, 64K, 500M or 1B; None for what is no such number above zero, or no whole
    one unless it `rounds` down.
    """
    match = re.fullmatch(r"(\d{1,30}(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if match is None:
        return None

    number, unit = match.groups()
    amount = Fraction(number) * units.get(unit, 0)
    if amount.denominator != 1 and not rounds:
        return None
    return int(amount) or None


def tokens_type(least: int = 1) -> Amount:
    """A number of tokens."""
    return Amount(
        _COUNTS,
        f"number of tokens from {least} to 1000T; pass one like 65536, 64K, 500M or 1B",
        least,
    )


# Fewer than a thousand bytes are a number without its unit.
BYTES = Amount(
    _SIZES,
    "size; pass a number with KB, MB, GB, KiB, MiB or GiB, like 5GB",
    least=1000,
    rounds=True,
)


class Text(click.ParamType[Any]):
    """A name or a path, which need not exist.

    Args:
        python_type: What it is converted to: `str` or `Path`.
        blank: Whether it may be whitespace.
    """

    name = "text"

    def __init__(self, python_type: type = str, *, blank: bool = False) -> None:
        self._python_type = python_type
        self._blank = blank

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not self._is_name(text):
            self.fail(f"{value!r} is not a name or a path; pass text that is not blank", param, ctx)
        return self._python_type(text)

    def _is_name(self, text: Any) -> bool:
        if not isinstance(text, str) or "\0" in text:
            return False
        if self._blank:
            return bool(text)
        return bool(text.strip())


class Several(click.ParamType[tuple[Any, ...]]):
    """`1,8,32`: values of another type, one or more.

    A file with a comma in its name is one value.
    """

    name = "list"

    def __init__(self, value_type: click.ParamType[Any]) -> None:
        self.value_type = value_type

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        values: Sequence[Any]
        if isinstance(value, str) and not os.path.exists(value):
            words = [word.strip() for word in value.split(",")]
            values = [word for word in words if word]
        elif isinstance(value, list | tuple):
            values = value
        else:
            values = [value]

        if not values:
            self.fail(
                f"{value!r} is empty; pass one or more values, separated by commas", param, ctx
            )
        return tuple(self.value_type.convert(entry, param, ctx) for entry in values)


class KVHeads(click.ParamType[int | tuple[int, ...]]):
    """`8`, or one number for each layer: `1,3,3,1`."""

    name = "kv heads"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            counts = Several(COUNT).convert(value, param, ctx)
        except click.BadParameter:
            self.fail(
                f"{value!r} is not a number of KV heads; pass a positive whole number, or one for "
                "each layer, like 3,1,1,3; for a share of them there is --kv-budget 0.5",
                param,
                ctx,
            )
        return counts if len(counts) > 1 else counts[0]
