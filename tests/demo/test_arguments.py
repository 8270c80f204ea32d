import argparse

import pytest

from tierkv.config.model import CODECS as CONFIGURED_CODECS
from tierkv.demo.main import CODECS, add_arguments, settings_from
from tierkv.errors import UsageError


def settings(*words: str):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings_from(parser.parse_args(words))


def test_both_models_by_default_each_with_its_own_length():
    got = settings()
    assert got.models == ("smollm2", "hybrid")
    assert (got.lengths("smollm2"), got.lengths("hybrid")) == ((1024,), (4096,))
    assert (got.codec, got.as_json, got.tui) == ("int8", False, False)


def test_lengths_are_for_every_model_asked_for():
    got = settings("--model", "hybrid", "--tokens", "2048,4096,8192", "--codec", "lossless", "--json")
    assert got.models == ("hybrid",)
    assert got.lengths("hybrid") == (2048, 4096, 8192)
    assert (got.codec, got.as_json) == ("lossless", True)


@pytest.mark.parametrize("tokens", ["many", "1024,", "63", "65537", "-5", "1e3", "40000,40000"])
def test_length_that_is_none_is_refused(tokens: str):
    with pytest.raises(UsageError, match="--tokens"):
        settings(f"--tokens={tokens}")


def test_console_needs_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(UsageError, match="terminal"):
        settings("--tui")


def test_codecs_are_those_of_the_configuration():
    assert CODECS == CONFIGURED_CODECS
