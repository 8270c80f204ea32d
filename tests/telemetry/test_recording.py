"""Recordings: what goes in comes out, files that are cut off or hostile are read as far as they go."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tierkv.telemetry.histogram import HistogramSnapshot
from tierkv.telemetry.recording import (
    BadRecording,
    Header,
    Recorder,
    Step,
    header_line,
    read_recording,
    step_line,
    write_packed,
)
from tierkv.telemetry.snapshot import (
    EngineSnapshot,
    Event,
    LinkSnapshot,
    MemorySnapshot,
    NodeSnapshot,
    TierSnapshot,
    Window,
)

HEADER = Header("lab", 1.0, {"tierkv": "0.1.0"}, {"vault.max_bytes": 4})
NODE = NodeSnapshot(
    "id", "nas", "kv-vault", "0.1.0", "127.0.0.1:1", 7, 1.0, 2.0, 3, MemorySnapshot(100, 40, 1, 0.6, 2, "note"),
    (TierSnapshot("kv", 5, 10, miss_reasons={"evicted": 2}, promote_s=HistogramSnapshot({53: 98, 70: 2}, 1.4),
                  windows=(Window(60.0, 8, 2),)),),
    (LinkSnapshot("a:1", "kv", "up", 0.1),), (EngineSnapshot("mlx-lm", model="m"),), "idle", {"x": 1}, 9,
)  # fmt: skip
EVENT = Event(1, 1.5, "evict", "info", "nas", "[red]\u202e\n", {"keys": "ab"})
STEPS = [
    Step(10.0, "a:1", NODE, True),
    Step(10.5, "a:1", events=(EVENT,), dropped=3),
    Step(11.0, "a:1", ended="connection refused", phase="refused"),
]


def written(path: Path, steps=STEPS, **options) -> Path:
    recorder = Recorder(path, HEADER, **options)
    for step in steps:
        recorder.add(step)
    recorder.close()
    return path


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    assert read_recording(written(tmp_path / "r.ndjson")) == (HEADER, STEPS)
    write_packed(tmp_path / "r.gz", HEADER, [step_line(step) for step in STEPS])
    assert read_recording(tmp_path / "r.gz") == (HEADER, STEPS)


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path, packed: bool) -> None:
    whole = "\n".join([header_line(HEADER), *(step_line(step) for step in STEPS), ""])
    data = gzip.compress(whole.encode()) if packed else whole.encode()
    path = tmp_path / "cut"
    path.write_bytes(data[: -12 if packed else -20])
    told: list[str] = []
    _, steps = read_recording(path, told.append)
    assert steps == STEPS[: len(steps)]
    assert len(steps) >= 2
    assert told == ["what follows cannot be unpacked" if packed else "a line without an end is left out"]


@pytest.mark.parametrize("bad", ["", "garbage", "{}", '{"at": 1}', "\ufffd" * 5, "[" * 100_000])
def test_a_damaged_line_costs_itself_alone_and_is_told(tmp_path: Path, bad: str) -> None:
    lines = [step_line(step) for step in STEPS]
    path, told = tmp_path / "bad", []
    path.write_text("\n".join([header_line(HEADER), lines[0], bad, bad, *lines[1:], ""]))
    assert read_recording(path, told.append) == (HEADER, STEPS)
    assert told == ["2 damaged lines are left out"]
    written(tmp_path / "whole")
    told.clear()
    read_recording(tmp_path / "whole", told.append)
    assert told == []


@pytest.mark.parametrize(
    "text",
    ["", "nonsense\n", "[1]\n", json.dumps({"schema": "other/1"}) + "\n", header_line(HEADER) + "\n",
     header_line(HEADER) + '\n{"at": 1}\n', header_line(HEADER) + "\n" + "[" * 100_000 + "\n"],
)  # fmt: skip
def test_what_is_no_recording_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(BadRecording):
        read_recording(path)


def test_a_newer_writers_fields_are_left_out(tmp_path: Path) -> None:
    body = json.loads(step_line(STEPS[0]))
    body["node"]["novelty"] = 1
    path = tmp_path / "new"
    path.write_text(f"{header_line(HEADER)}\n{json.dumps(body)}\n")
    assert read_recording(path)[1] == STEPS[:1]


def test_with_a_bound_the_oldest_half_goes(tmp_path: Path) -> None:
    steps = [Step(float(i), "a:1", NODE, True) for i in range(200)]
    path = written(tmp_path / "r", steps, max_bytes=20_000)
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) < 23_000
    _, kept = read_recording(path)
    assert kept == steps[-len(kept) :]
    assert len(kept) > 10


def test_an_earlier_recording_is_kept_apart(tmp_path: Path) -> None:
    path = written(tmp_path / "r", [Step(float(i), "a:1", NODE, True) for i in range(200)], max_bytes=20_000)
    written(path)
    assert read_recording(path) == (HEADER, STEPS)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["r", "r.1.old", "r.old"]


def test_a_packed_file_that_is_damaged_inside_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    write_packed(path, HEADER, [step_line(step) for step in STEPS])
    data = path.read_bytes()
    for at in range(10, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            _, steps = read_recording(path)
        except BadRecording:
            continue
        assert len(steps) <= len(STEPS)
