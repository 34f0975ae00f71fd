"""Sampling: no label lost or trained twice, every sequence once per epoch, nothing that depends on ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from basp.data.sampling import Batches, cut_documents, split_eval
from basp.errors import ConfigError, DataError

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def cut(lengths, max_length, long_documents="split", **options):
    return cut_documents(np.asarray(lengths), max_length=max_length, long_documents=long_documents, **options).tolist()


def labels(spans):
    """How often each (document, position of the input, position of the label) is trained."""
    return Counter((d, t, t + 1) for d, start, stop in spans for t in range(start, stop - 1))


# --- spans ---


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 70))
def test_kf17_split_trains_every_label_exactly_once(lengths, max_length):
    assume(max(lengths) >= 2)
    spans = cut(lengths, max_length)
    assert labels(spans) == labels((d, 0, length) for d, length in enumerate(lengths))
    for document, start, stop in spans:
        assert 2 <= stop - start <= max_length
        assert 0 <= start < stop <= lengths[document]
    assert spans == sorted(spans)
    # as few pieces as labels allow
    assert len(spans) == sum(-(-(length - 1) // (max_length - 1)) for length in lengths)


@pytest.mark.parametrize(
    ("length", "pieces"),
    [
        (2, [(0, 2)]),
        (4, [(0, 4)]),
        (5, [(0, 4), (3, 5)]),
        (7, [(0, 4), (3, 7)]),
        (8, [(0, 4), (3, 7), (6, 8)]),
    ],
)
def test_split_overlaps_by_one_token(length, pieces):
    assert cut([length], 4) == [[0, start, stop] for start, stop in pieces]


def test_split_into_pairs():
    assert cut([4], 2) == [[0, 0, 2], [0, 1, 3], [0, 2, 4]]


def test_truncate_keeps_the_first_tokens():
    assert cut([3, 10, 1, 4], 4, "truncate") == [[0, 0, 3], [1, 0, 4], [3, 0, 4]]


def test_refuse_keeps_whole_documents_and_names_the_first_that_is_too_long():
    assert cut([3, 1, 4], 4, "refuse") == [[0, 0, 3], [2, 0, 4]]
    with pytest.raises(DataError, match=r"^b has 9 tokens \(and 1 more are too long\)") as caught:
        cut([3, 9, 12], 4, "refuse", name="abc".__getitem__)
    assert 'at most max_length = 4 tokens when long_documents is "refuse"' in str(caught.value)
    assert "raise data.max_length to 12" in str(caught.value)
    with pytest.raises(DataError, match=r"^document 1 has 9 tokens\. "):
        cut([3, 9], 4, "refuse")


def test_chosen_documents_keep_their_numbers_and_order():
    assert cut([5, 2, 6], 4, documents=np.array([2, 0])) == [[2, 0, 4], [2, 3, 6], [0, 0, 4], [0, 3, 5]]
    assert cut([99, 2], 4, "refuse", documents=np.array([1])) == [[1, 0, 2]]
    with pytest.raises(DataError, match=r"^document 2 has 6"):
        cut([5, 2, 6], 4, "refuse", documents=np.array([1, 2]))


def test_spans_are_int64_rows():
    spans = cut_documents(np.array([3, 4]), max_length=4, long_documents="split")
    assert (spans.dtype, spans.shape) == (np.int64, (2, 3))


@pytest.mark.parametrize("long_documents", ["split", "truncate", "refuse"])
def test_unusable_settings_and_lengths_are_refused(long_documents):
    with pytest.raises(ConfigError, match=r"max_length = 1\. Allowed: at least 2.*data\.max_length"):
        cut([5], 1, long_documents)
    with pytest.raises(DataError, match="none of 2 documents has 2 tokens"):
        cut([1, 1], 4, long_documents)
    with pytest.raises(DataError, match="none of 0 documents"):
        cut([5], 4, long_documents, documents=np.array([], dtype=np.int64))


def test_unknown_treatment_of_long_documents_is_refused():
    with pytest.raises(ConfigError, match=r'long_documents = \'drop\'\. Allowed: "split", "truncate", "refuse"'):
        cut([5], 4, "drop")


# --- evaluation documents ---


@settings(deadline=None)
@given(st.integers(2, 300), st.floats(0, 1, exclude_max=True, exclude_min=True), st.integers(0, 2**40))
def test_split_eval_partitions_documents(documents, fraction, seed):
    train, held_out = split_eval(documents, fraction=fraction, seed=seed)
    assert sorted([*train, *held_out]) == list(range(documents))
    assert (np.sort(train) == train).all()
    assert (np.sort(held_out) == held_out).all()
    assert len(train) >= 1
    assert len(held_out) >= 1
    assert abs(len(held_out) - fraction * documents) <= 1
    again = split_eval(documents, fraction=fraction, seed=seed)
    np.testing.assert_array_equal(again[1], held_out)


def test_split_eval_by_seed():
    assert split_eval(10, fraction=0.3, seed=0)[1].tolist() != split_eval(10, fraction=0.3, seed=1)[1].tolist()
    train, held_out = split_eval(5, fraction=0, seed=0)
    assert (train.tolist(), held_out.tolist()) == ([0, 1, 2, 3, 4], [])
    assert train.dtype == held_out.dtype == np.int64


def test_split_eval_does_not_follow_an_epochs_order():
    held_out = set(split_eval(1000, fraction=0.1, seed=5)[1].tolist())
    for epoch in range(3):
        first = Batches(spans=1000, sequences=100, accumulation=1, shuffle=True, seed=5)
        drawn = set(first.step(epoch * 10)[0]) | set(first.step(epoch * 10 + 9)[0])
        assert len(held_out & drawn) < 60  # 20 by chance; 100 if both read the same stream


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2, float("nan")])
def test_split_eval_refuses_fractions_outside_0_to_1(fraction):
    with pytest.raises(ConfigError, match=rf"eval_fraction = {fraction}\. Allowed: 0 .*not including, 1"):
        split_eval(10, fraction=fraction, seed=0)


def test_split_eval_refuses_one_document_and_negative_seeds():
    with pytest.raises(DataError, match="of 1 document\\. Allowed: at least 2 documents"):
        split_eval(1, fraction=0.1, seed=0)
    with pytest.raises(ConfigError, match="seed = -1"):
        split_eval(9, fraction=0.1, seed=-1)


# --- batches ---

BATCHES = st.builds(
    Batches,
    spans=st.integers(1, 70),
    sequences=st.integers(1, 9),
    accumulation=st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)


@settings(deadline=None)
@given(BATCHES, st.integers(0, 3))
def test_kf34_every_sequence_once_per_epoch(batches, epoch):
    first = epoch * batches.steps_per_epoch
    steps = [batches.step(first + i) for i in range(batches.steps_per_epoch)]
    assert sorted(i for step in steps for micro in step for i in micro) == list(range(batches.spans))
    for step in steps[:-1]:
        assert [len(micro) for micro in step] == [batches.sequences] * batches.accumulation
    assert 1 <= len(steps[-1]) <= batches.accumulation
    assert all(len(micro) == batches.sequences for micro in steps[-1][:-1])
    assert 1 <= len(steps[-1][-1]) <= batches.sequences


def test_kf26_last_step_of_an_epoch_is_smaller():
    batches = Batches(spans=10, sequences=2, accumulation=2, shuffle=False, seed=0)
    steps = [batches.step(i) for i in range(4)]
    assert steps == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]], [[0, 1], [2, 3]]]


@settings(deadline=None)
@given(BATCHES, st.lists(st.integers(0, 300), max_size=12))
def test_kf36_any_step_may_be_asked_in_any_order(batches, indices):
    for index in indices:
        assert batches.step(index) == replace(batches).step(index)


def test_order_changes_with_epoch_and_seed_only():
    batches = Batches(spans=50, sequences=50, accumulation=1, shuffle=True, seed=3)
    epoch0, epoch1 = batches.step(0)[0], batches.step(1)[0]
    assert epoch0 != epoch1
    assert epoch0 == np.random.default_rng((3, 0)).permutation(50).tolist()
    assert epoch1 == np.random.default_rng((3, 1)).permutation(50).tolist()
    assert replace(batches, seed=4).step(0)[0] != epoch0
    assert replace(batches, sequences=10, accumulation=5).step(0) == [epoch0[i : i + 10] for i in range(0, 50, 10)]
    assert all(type(i) is int for i in epoch0)


def test_epochs_and_steps():
    batches = Batches(spans=10, sequences=2, accumulation=2, shuffle=False, seed=0)
    assert [batches.epoch_after(i) for i in range(5)] == [0, 0.4, 0.8, 1.0, 1.4]
    for epochs, steps in [(1, 3), (2, 6), (0.4, 1), (0.41, 2), (1.4, 4), (1.8, 5), (0.001, 1), (2.9, 9)]:
        assert batches.steps_for(epochs) == steps
    # In floats 1.1 % 1 * 10 is 1.0000000000000009, which would round up to a twelfth step.
    assert Batches(spans=10, sequences=1, accumulation=1, shuffle=False, seed=0).steps_for(1.1) == 11


@settings(deadline=None)
@given(BATCHES, st.floats(0.01, 5))
def test_steps_for_is_the_fewest_that_complete(batches, epochs):
    steps = batches.steps_for(epochs)
    assert batches.epoch_after(steps) >= epochs - 1e-9
    assert batches.epoch_after(steps - 1) < epochs


@pytest.mark.parametrize("name", ["spans", "sequences", "accumulation"])
def test_batches_refuse_sizes_below_1(name):
    fine = {"spans": 4, "sequences": 2, "accumulation": 1, "shuffle": True, "seed": 0}
    with pytest.raises(ConfigError, match=f"{name} = 0. Allowed: at least 1"):
        Batches(**{**fine, name: 0})
    with pytest.raises(ConfigError, match="seed = -1"):
        Batches(**{**fine, "seed": -1})


@pytest.mark.parametrize("epochs", [0, -1, float("inf"), float("nan")])
def test_impossible_epochs_are_refused(epochs):
    with pytest.raises(ConfigError, match=r"epochs = .*optim\.epochs"):
        Batches(spans=4, sequences=2, accumulation=1, shuffle=True, seed=0).steps_for(epochs)


def test_negative_step_is_refused():
    with pytest.raises(IndexError):
        Batches(spans=4, sequences=2, accumulation=1, shuffle=True, seed=0).step(-1)
