"""What goes over the hand-off socket is framed, bounded and checked."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from tierkv.errors import HandoffError
from tierkv.handoff.protocol import (
    HEADER,
    MAGIC,
    FileSeen,
    Media,
    Message,
    ModelAnnouncement,
    Segment,
    int_of,
    media_from_json,
    media_to_json,
    model_files,
    pack,
    segment_view,
    segments_of,
    tokens_of,
    unpack_body,
    unpack_header,
)
from tierkv.state.layout import ArraySpec, LayerLayout, Layout

LAYOUT = Layout(
    (
        LayerLayout("rows", "KVCache", (ArraySpec("k", "bfloat16", (1, 2, -1, 4)), ArraySpec("v", "none", ()))),
        LayerLayout("state", "ArraysCache", (ArraySpec("0", "float32", (3,)),)),
    )
)


def test_a_message_is_a_header_json_and_a_blob():
    data = pack("offer", {"id": 7}, blob_bytes=5)
    assert data[:12] == b"TKH1" + struct.pack("<II", len(data) - 12, 5)
    assert json.loads(data[12:]) == {"op": "offer", "id": 7}
    assert unpack_header(data[:12]) == (len(data) - 12, 5)
    message = unpack_body(data[12:], b"12345")
    assert (message.op, message.integer("id"), message.blob) == ("offer", 7, b"12345")


@pytest.mark.parametrize(
    "header",
    [
        b"TKH2" + struct.pack("<II", 10, 0),
        HEADER.pack(MAGIC, 1, 0),
        HEADER.pack(MAGIC, (1 << 20) + 1, 0),
        HEADER.pack(MAGIC, 10, (64 << 20) + 1),
    ],
)
def test_a_wrong_header_is_refused_before_anything_is_read(header: bytes):
    with pytest.raises(HandoffError):
        unpack_header(header)


@pytest.mark.parametrize("text", [b"{", b"[]", b"5", b'{"op": 5}', b"{}", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000])
def test_a_wrong_body_is_refused(text: bytes):
    with pytest.raises(HandoffError):
        unpack_body(text)


def test_a_message_over_the_limit_is_not_made():
    with pytest.raises(HandoffError):
        pack("report", {"stats": "x" * (1 << 20)})
    with pytest.raises(HandoffError):
        pack("offer", {}, blob_bytes=(64 << 20) + 1)


@pytest.mark.parametrize("value", [None, -1, 1.0, True, "1", 1 << 60, []])
def test_only_small_whole_numbers_are_integers(value: object):
    with pytest.raises(HandoffError):
        int_of(value, "offset")


def test_fields_are_checked_when_they_are_read():
    message = Message("x", {"text": 5, "number": float("nan"), "table": [], "list": [1, -1], "long": "x" * 50})
    for read in (
        lambda: message.text("text"),
        lambda: message.text("long", 10),
        lambda: message.number("number"),
        lambda: message.table("table"),
        lambda: message.numbers("list"),
        lambda: message.integer("absent"),
    ):
        with pytest.raises(HandoffError):
            read()


def test_tokens_are_64_bit_little_endian():
    assert tokens_of(struct.pack("<3q", 1, -(1 << 59), 5)).tolist() == [1, -(1 << 59), 5]
    with pytest.raises(HandoffError):
        tokens_of(b"1234567")


def test_segments_are_those_of_the_layout():
    assert segments_of([[0, 0, 512, 64, [1, 2, 256, 4]]], LAYOUT, 64 + 4096) == [Segment(0, 0, 512, 64, (1, 2, 256, 4))]
    assert segments_of([[1, 0, 3, 0, [3]]], LAYOUT, 12) == [Segment(1, 0, 3, 0, (3,))]


@pytest.mark.parametrize(
    "segment",
    [
        [2, 0, 0, 0, [3]],
        [0, 1, 0, 0, []],
        [0, 2, 0, 0, [1, 2, 1, 4]],
        [-1, 0, 0, 0, [3]],
        [0, 0, 0, 0, [1, 3, 256, 4]],
        [0, 0, 0, 0, [1, 2, 4]],
        [0, 0, 0, 0, [1, 2, -5, 4]],
        [0, 0, 0, 0, [1, 2, 1 << 30, 4]],
        [0, 0, 0, 4090, [1, 2, 1, 4]],
        [0, 0, 0, 1 << 70, [1, 2, 1, 4]],
        [0, 0, 0, 0],
        [0, 0, 0, 0, "x"],
        [0, 0, None, 0, [1, 2, 1, 4]],
        5,
    ],
)
def test_segments_that_do_not_fit_are_refused(segment: object):
    with pytest.raises(HandoffError):
        segments_of([segment], LAYOUT, 4096)


def test_a_view_of_a_segment_is_its_bits_in_place():
    region = memoryview(bytearray(range(64)) + bytearray(64))
    view = segment_view(Segment(0, 0, 0, 16, (1, 2, 1, 4)), LAYOUT, region)
    assert view.dtype == np.uint16
    assert view[0, 0, 0, 0] == 16 | 17 << 8
    view[0, 0, 0, 1] = 0xBEEF
    assert bytes(region[18:20]) == b"\xef\xbe"


def test_an_announcement_survives_json():
    said = ModelAnnouncement("m", (FileSeen("/a", 1, 2, 3, 1 << 62),), '{"a": 1}', kv_bits=4, shard_world=2)
    assert ModelAnnouncement.from_json(json.loads(json.dumps(said.to_json()))) == said


@pytest.mark.parametrize(
    "change",
    [
        {"weights": None},
        {"weights": [[1]]},
        {"weights": [[1, 2, 3, 4, 5]]},
        {"name": 5},
        {"kv_bits": "4"},
        {"kv_bits": -1},
    ],
)
def test_a_wrong_announcement_is_refused(change: dict[str, object]):
    said = ModelAnnouncement("m", (FileSeen("/a", 1, 2, 3, 4),)).to_json()
    with pytest.raises(HandoffError):
        ModelAnnouncement.from_json({**said, **change})
    with pytest.raises(HandoffError):
        ModelAnnouncement.from_json([])


def test_media_survive_json():
    media = (Media(3, 10, b"\x01\x02"), Media(50, 1, b""))
    assert media_from_json(media_to_json(media)) == media
    for wrong in (None, [[1, 2]], [[1, 2, "zz"]], [[1, 2, "aa" * 65]], [[-1, 2, "aa"]], [[1, 2, 3]]):
        with pytest.raises(HandoffError):
            media_from_json(wrong)


def test_the_files_of_a_model_are_weights_configuration_and_code(tmp_path: Path):
    for name in ("a.safetensors", "b.gguf", "config.json", "modeling.py", "README.md", "tokenizer.json"):
        (tmp_path / name).write_text(name)
    (tmp_path / "sub").mkdir()
    names = [Path(seen.path).name for seen in model_files(tmp_path)]
    assert names == ["a.safetensors", "b.gguf", "config.json", "modeling.py"]
    (one,) = model_files(tmp_path / "b.gguf")
    stat = (tmp_path / "b.gguf").stat()
    assert one == (str(tmp_path / "b.gguf"), stat.st_dev, stat.st_ino, 6, stat.st_mtime_ns)


def test_a_link_is_the_file_behind_it(tmp_path: Path):
    (tmp_path / "blob").write_text("x")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").symlink_to(tmp_path / "blob")
    (seen,) = model_files(tmp_path / "m")
    assert seen.inode == (tmp_path / "blob").stat().st_ino


def test_a_folder_without_weights_says_so(tmp_path: Path):
    with pytest.raises(HandoffError, match="no weights"):
        model_files(tmp_path)
    with pytest.raises(HandoffError, match="cannot be listed"):
        model_files(tmp_path / "absent")
