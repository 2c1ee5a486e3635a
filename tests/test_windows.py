"""Windows against hand-written lists, against lm-evaluation-harness' own generator, and by identities."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from gqa.corpus.windows import Window, batches, llama_cpp_windows, rolling_windows

P = 99  # the prefix


def shown(windows):
    return [(list(w.ids), w.scored) for w in windows]


def test_llama_cpp_windows_by_hand():
    assert shown(llama_cpp_windows(range(19), 8, None)) == [
        ([0, 1, 2, 3, 4, 5, 6, 7], 3),  # n_ctx - 1 - n_ctx / 2
        ([8, 9, 10, 11, 12, 13, 14, 15], 3),
    ]
    assert shown(llama_cpp_windows(range(8), 8, P)) == [([P, 1, 2, 3, 4, 5, 6, 7], 3)]
    (window,) = llama_cpp_windows(range(512), 512, None)
    assert window.scored == 255


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
