"""Where chunks lie in a prompt: properties over random prompts of few different ids, so that accidents happen."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.prompt import MIN_RUN, SHORT_CHUNK, Span, as_array, count_joint_differences, find_spans
from blendkv.testing import byte_tokenizer

ids_ = st.lists(st.integers(0, 3), max_size=60)
chunks_ = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), max_size=5)


def array(*parts):
    return np.concatenate([np.asarray(p, dtype=np.int64) for p in parts]) if parts else np.zeros(0, np.int64)


def check(prompt, chunks, spans):
    at = 0
    for span in spans:
        assert span.start >= at  # in order, no overlaps
        at = span.stop
        assert span.length > 0
        assert at <= len(prompt)
        assert 0 <= span.offset <= span.offset + span.length <= len(chunks[span.chunk])
        here = prompt[span.start : span.stop]
        assert np.array_equal(here, chunks[span.chunk][span.offset : span.offset + span.length])


@settings(deadline=None)
@given(ids_, chunks_)
def test_spans_never_overlap_and_match_their_ids(prompt, chunks):
    prompt, chunks = array(prompt), [array(c) for c in chunks]
    check(prompt, chunks, find_spans(prompt, chunks))


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=8), st.integers(0, 10_000))
def test_chunks_put_anywhere_in_any_order_are_found(layout, seed):
    """Distinct ids outside: every placement of a whole chunk, repeats included, is found where it was put."""
    rng = np.random.default_rng(seed)
    chunks = [rng.permutation(np.arange(100 * i, 100 * i + 40))[: rng.integers(8, 40)] for i in (1, 2, 3)]
    parts, want, at = [], [], 0
    for i in layout:
        gap = rng.integers(1000, 2000, rng.integers(0, 4))
        parts += [gap, chunks[i]]
        want.append(Span(i, at + len(gap), 0, len(chunks[i])))
        at += len(gap) + len(chunks[i])
    prompt = array(*parts)
    assert find_spans(prompt, chunks) == want


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 10_000))
def test_a_chunk_that_lost_its_ends_is_reused_in_part(front, back, seed):
    rng = np.random.default_rng(seed)
    chunk = rng.permutation(60)
    middle = chunk[front : 60 - back]
    prompt = array(rng.integers(100, 200, 5), middle, rng.integers(100, 200, 3))
    (span,) = find_spans(prompt, [chunk])
    assert span == Span(0, 5, front, len(middle))


def test_short_runs_are_not_worth_it():
    chunk = np.arange(60)
    assert find_spans(array([999], chunk[: MIN_RUN - 1], [999]), [chunk]) == []
    assert find_spans(array([999], chunk[:MIN_RUN], [999]), [chunk]) == [Span(0, 1, 0, MIN_RUN)]
    short = np.arange(10)  # half of a short chunk is enough
    assert find_spans(array([999], short[:5], [999]), [short]) == [Span(0, 1, 0, 5)]
    assert find_spans(array([999], short[:4], [999]), [short]) == []


def test_short_chunks_are_found_as_often_as_given():
    chunk = np.arange(SHORT_CHUNK - 1)
    prompt = array(chunk, [99], chunk, [99], chunk)
    assert len(find_spans(prompt, [chunk])) == 1
    assert len(find_spans(prompt, [chunk, chunk])) == 2
    long = np.arange(SHORT_CHUNK)
    assert len(find_spans(array(long, [99], long, [99], long), [long])) == 3


def test_longer_chunks_first():
    inner, outer = np.arange(10, 22), np.arange(0, 40)
    assert find_spans(outer, [inner, outer]) == [Span(1, 0, 0, 40)]
    assert [s.chunk for s in find_spans(array(outer, inner), [inner, outer])] == [1, 0]


def test_prompt_ends_inside_a_chunk_and_chunk_longer_than_prompt():
    chunk = np.arange(50)
    assert find_spans(chunk[:30], [chunk]) == [Span(0, 0, 0, 30)]
    assert find_spans(array([7, 7], chunk[:30]), [chunk]) == [Span(0, 2, 0, 30)]
    assert find_spans(chunk[:10], [chunk]) == []


def test_empties():
    assert find_spans(array(), []) == []
    assert find_spans(array(), [np.arange(5)]) == []
    assert find_spans(np.arange(5), []) == []


def test_no_match_inside_an_integer():
    """Ids are eight bytes: a match that does not begin at an id's border is none."""
    assert find_spans(array([256, 256]), [array([1])]) == []


def test_periodic_text_does_not_overlap():
    chunk = np.full(12, 5)
    spans = find_spans(np.full(40, 5), [chunk])
    check(np.full(40, 5), [chunk], spans)
    assert sum(s.length for s in spans) == 36


def test_cut():
    span = Span(2, 10, 3, 5)
    assert span.stop == 15
    assert span.cut(20) == span
    assert span.cut(12) == Span(2, 10, 3, 2)
    assert span.cut(10) is None


def test_joint_tokenisation_is_compared():
    tokenizer = byte_tokenizer(merges=(("a", "b"),))
    assert count_joint_differences(tokenizer, ["xa", "bx"]) == 1
    assert count_joint_differences(tokenizer, ["xab", "x"]) == 0


@pytest.mark.parametrize("bad", [[[1]], [0.5], torch.zeros(2), np.zeros((1, 2), int)])
def test_ids_must_be_a_row_of_integers(bad):
    with pytest.raises(ValueError, match="one row of integers"):
        as_array(bad)


def test_ids_of_every_kind():
    for ids in ([1, 2], (1, 2), torch.tensor([1, 2]), np.array([1, 2], np.uint16)):
        assert as_array(ids).tolist() == [1, 2]
        assert as_array(ids).dtype == np.int64
    assert as_array([]).shape == (0,)
