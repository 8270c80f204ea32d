"""Snapshots, events, selectors and prefixes survive the wire, field by field."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import get_type_hints

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tierkv.rpc import convert, telemetry_wire
from tierkv.rpc.admin import PrefixSummary
from tierkv.store.base import Selector
from tierkv.telemetry.histogram import HistogramSnapshot
from tierkv.telemetry.snapshot import (
    EngineSnapshot,
    Event,
    LinkSnapshot,
    MemorySnapshot,
    NodeSnapshot,
    TierSnapshot,
    Window,
)
from tierkv.v1 import telemetry_pb2 as pb

counts = st.integers(0, 2**64 - 1)
seconds = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
reasons = st.dictionaries(texts, counts, max_size=3)
histograms = st.builds(
    HistogramSnapshot, st.dictionaries(st.integers(0, 127), st.integers(1, 2**40), max_size=4), seconds
)
windows = st.builds(Window, seconds, counts, counts, counts, counts, counts)
tiers = st.builds(
    TierSnapshot, texts, counts, counts, counts, counts, counts, counts, reasons, counts, counts, counts, counts,
    reasons, histograms, histograms, st.lists(windows, max_size=2).map(tuple), counts, counts, counts,
)  # fmt: skip
memories = st.builds(MemorySnapshot, counts, counts, counts, seconds, counts, texts)
links = st.builds(LinkSnapshot, texts, texts, texts, seconds, seconds, seconds, counts, texts)
engines = st.builds(EngineSnapshot, texts, texts, texts, texts, st.booleans(), counts, seconds, texts)
nodes = st.builds(
    NodeSnapshot, texts, texts, texts, texts, texts, st.integers(0, 2**32 - 1), seconds, seconds, counts, memories,
    st.lists(tiers, max_size=2).map(tuple), st.lists(links, max_size=2).map(tuple),
    st.lists(engines, max_size=2).map(tuple), texts, reasons, counts,
)  # fmt: skip
events = st.builds(Event, counts, seconds, texts, texts, texts, texts, st.dictionaries(texts, texts, max_size=3))


@settings(max_examples=60)
@given(nodes)
def test_a_snapshot_comes_back_equal(node: NodeSnapshot):
    wire = telemetry_wire.node_to_proto(node).SerializeToString()
    assert telemetry_wire.node_from_proto(pb.NodeSnapshot.FromString(wire)) == node


@given(events)
def test_an_event_comes_back_equal(event: Event):
    assert telemetry_wire.event_from_proto(telemetry_wire.event_to_proto(event)) == event


@given(
    st.builds(
        Selector, st.sampled_from([b"", b"r" * 32]), texts,
        st.lists(st.binary(min_size=4, max_size=32), max_size=3).map(tuple), st.floats(0, 1e9),
        st.sampled_from(["", "kv", "ssm"]),
    )
)  # fmt: skip
def test_a_selector_comes_back_equal(selector: Selector):
    assert convert.selector_from_proto(convert.selector_to_proto(selector)) == selector


@given(
    st.builds(
        PrefixSummary, st.binary(max_size=32), st.binary(max_size=32), texts, counts, counts, counts,
        st.integers(0, 2**32 - 1), seconds, seconds, counts, st.booleans(), st.integers(0, 255),
        st.lists(texts, max_size=3).map(tuple), texts,
    )
)  # fmt: skip
def test_a_prefix_comes_back_equal(prefix: PrefixSummary):
    assert convert.prefix_from_proto(convert.prefix_to_proto(prefix)) == prefix


@pytest.mark.parametrize(
    ("domain", "message"),
    [
        (NodeSnapshot, pb.NodeSnapshot), (TierSnapshot, pb.TierSnapshot), (MemorySnapshot, pb.MemorySnapshot),
        (LinkSnapshot, pb.LinkSnapshot), (EngineSnapshot, pb.EngineSnapshot), (Event, pb.Event), (Window, pb.Window),
    ],
)  # fmt: skip
def test_domain_and_proto_have_the_same_fields(domain, message):
    assert is_dataclass(domain)
    assert get_type_hints(domain)
    assert {field.name for field in fields(domain)} == {field.name for field in message.DESCRIPTOR.fields}


def test_a_histogram_with_impossible_buckets_loses_only_those():
    message = pb.Histogram(bucket=[3, 128, 5], count=[1, 2, 3], sum_s=1.0)
    assert telemetry_wire.histogram_from_proto(message).counts == {3: 1, 5: 3}
