"""Windows against hand-written lists, against lm-evaluation-harness' own generator, and by identities."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from gqa.eval.scoring import Window, batches, rolling_windows

P = 99  # the prefix


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 60))
def test_rolling_windows_are_those_of_the_harness(count, context):
    ids = list(range(1000, 1000 + count))
    theirs = list(map(make_disjoint_window, get_rolling_token_windows(ids, P, context, 1)))
    ours = [(list(w.ids[: -w.scored]), list(w.ids[-w.scored :])) for w in rolling_windows(ids, context, P)]
    assert ours == [(list(a), list(b)) for a, b in theirs]
    assert [i for w in rolling_windows(ids, context, P) for i in w.ids[-w.scored :]] == ids  # each once, in order


def test_batches_hold_every_window_once_and_similar_lengths_together():
    windows = [Window(tuple(range(n)), 1) for n in (3, 9, 4, 9, 2, 7)]
    grouped = list(batches(windows, 2))
    assert grouped == [[1, 3], [5, 2], [0, 4]]
    assert list(batches(windows, 100)) == [[1, 3, 5, 2, 0, 4]]
