"""The content of files is what counts, and only as long as they are the files that were loaded."""

import os
from pathlib import Path

import pytest
from blake3 import blake3

from tierkv.handoff.protocol import model_files
from tierkv.identity import weights
from tierkv.identity.weights import DigestCache, WeightsUnusable, content_digest, text_digest


def model(folder: Path, content: bytes = b"weights" * 5000, config: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text(config)
    (folder / "README.md").write_text("not part of the model")
    return folder


def digest_of(folder: Path, cache: DigestCache | None = None) -> str:
    return content_digest(model_files(folder), cache)


def test_the_digest_is_that_of_a_plain_blake3_call(tmp_path: Path):
    folder = model(tmp_path / "m", b"abc", "{}")
    total = blake3(derive_key_context="tierkv 2026 v1 file contents")
    for suffix, content in sorted([(b".safetensors", b"abc"), (b".json", b"{}")]):
        total.update(len(suffix).to_bytes(4, "little") + suffix + blake3(content).digest())
    assert digest_of(folder) == total.hexdigest()


def test_two_fine_tunes_of_equal_size_differ(tmp_path: Path):
    left = model(tmp_path / "left", b"a" * 100_000)
    right = model(tmp_path / "right", b"a" * 99_999 + b"b")
    assert digest_of(left) != digest_of(right)


def test_folder_names_and_file_names_do_not_matter(tmp_path: Path):
    left, right = model(tmp_path / "left"), model(tmp_path / "right")
    (right / "model.safetensors").rename(right / "other-00001-of-00001.safetensors")
    assert digest_of(left) == digest_of(right)


@pytest.mark.parametrize("name", ["config.json", "modeling.py", "second.safetensors"])
def test_every_file_that_makes_the_model_counts(tmp_path: Path, name: str):
    folder = model(tmp_path / "m")
    before = digest_of(folder)
    (folder / name).write_text("{ }")
    assert digest_of(folder) != before


def test_a_file_that_changed_since_it_was_loaded_is_refused(tmp_path: Path):
    folder = model(tmp_path / "m", b"a" * 1000)
    seen = model_files(folder)
    (folder / "model.safetensors").write_bytes(b"b" * 1000)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    with pytest.raises(WeightsUnusable) as caught:
        content_digest(seen)
    assert caught.value.reason == "weights_changed"


def test_a_file_that_changes_while_it_is_hashed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = model(tmp_path / "m")
    seen = model_files(folder)
    cache = DigestCache(tmp_path / "cache.json")

    class Meddling:
        AUTO = weights.blake3.AUTO

        def __init__(self, **options: object) -> None:
            self._inner = blake3()

        def update_mmap(self, path: str) -> None:
            self._inner.update_mmap(path)
            if path.endswith(".safetensors"):
                Path(path).write_bytes(b"z" * 35_001)

        def hexdigest(self) -> str:
            return self._inner.hexdigest()

    monkeypatch.setattr(weights, "blake3", Meddling)
    with pytest.raises(WeightsUnusable, match="not the file"):
        content_digest(seen, cache)
    monkeypatch.undo()
    changed = next(each for each in seen if each.path.endswith(".safetensors"))
    assert cache.get(*changed[1:]) is None


def test_what_is_not_there_is_unreadable(tmp_path: Path):
    seen = model_files(model(tmp_path / "m"))
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(WeightsUnusable) as caught:
        content_digest(seen)
    assert caught.value.reason == "weights_unreadable"
    with pytest.raises(WeightsUnusable) as caught:
        content_digest(())
    assert caught.value.reason == "no_weights"


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = model(tmp_path / "m")
    path = tmp_path / "deep" / "cache.json"
    first = digest_of(folder, DigestCache(path))

    class OnlyTheSum:
        """Adds up digests, but reads no file."""

        def __new__(cls, **options: object):
            assert "max_threads" not in options, "hashed again"
            return blake3(**options)

        AUTO = blake3.AUTO

    monkeypatch.setattr(weights, "blake3", OnlyTheSum)
    assert digest_of(folder, DigestCache(path)) == first


@pytest.mark.parametrize("damage", ["", "{", '{"version": 1}', '{"version": 1, "files": {"a": 5}}', "[]"])
def test_a_damaged_cache_costs_one_more_hashing(tmp_path: Path, damage: str):
    folder = model(tmp_path / "m")
    path = tmp_path / "cache.json"
    path.write_text(damage)
    assert digest_of(folder, DigestCache(path)) == digest_of(folder)


def test_equal_configurations_have_equal_digests():
    assert text_digest('{"a": 1, "b": 2}') == text_digest('{ "b":2, "a":1 }')
    assert text_digest('{"a": 1}') != text_digest('{"a": 2}')
    assert text_digest("not json") == blake3(b"not json").hexdigest()
