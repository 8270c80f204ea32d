"""The streaming check gives the verdict of ``verify_record``, whatever the pieces."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from store_records import make_record

from tierkv.codec.record import verify_record
from tierkv.errors import CorruptionError
from tierkv.store.verify import RecordVerifier

RECORD = make_record(range(7), payload_bytes=500, segments=3)


def verdict(data: bytes, cuts: list[int]) -> str:
    verifier = RecordVerifier(len(data))
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    try:
        for begin, end in pairwise(edges):
            verifier.feed(memoryview(data)[begin:end])
        verifier.finish()
    except CorruptionError as error:
        return type(error).__name__
    return "sound"


def expected(data: bytes) -> str:
    try:
        verify_record(data)
    except CorruptionError as error:
        return type(error).__name__
    return "sound"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 10**6), max_size=6), st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3))))
def test_the_same_verdict_as_on_the_whole_record(cuts, edits):
    data = bytearray(RECORD.data)
    for at, new in edits:
        at %= len(data)
        data[at : at + len(new)] = new
    assert verdict(bytes(data), cuts) == expected(bytes(data))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(RECORD.data) - 1), st.lists(st.integers(0, 10**6), max_size=3))
def test_every_truncation_is_refused(length, cuts):
    assert verdict(RECORD.data[:length], cuts) == "BadFrame"


def test_a_header_frame_without_its_header_is_refused():
    for name in ("", "x"):
        forged = make_record([1], model=name).header.pack_frame()[:96]
        assert verdict(forged, []) == "BadFrame"


def test_the_header_is_known_as_soon_as_it_is_whole():
    verifier = RecordVerifier(len(RECORD.data))
    size = len(RECORD.header.pack_frame())
    verifier.feed(memoryview(RECORD.data)[: size - 1])
    assert verifier.header is None
    verifier.feed(memoryview(RECORD.data)[size - 1 : size])
    assert verifier.header.key == RECORD.key
    assert np.array_equal(verifier.header.tokens, np.arange(7))
