"""``tierkv explain``: what it takes, what it refuses, and what it prints."""

import io
import json
from pathlib import Path

import pytest
from cli_agents import config_file

from tierkv.cli.explain import as_json, explanation_lines, prompt_ids
from tierkv.cli.output import Style
from tierkv.errors import UsageError
from tierkv.telemetry.explanation import Explanation, RequestLine, TierFinding

LONG = (
    "stored under another identity (Qwen3-8B as 0123456789ab: kv_bits (none there, 8 here), max_kv_size (none there))"
)
EXPLAINED = Explanation(
    RequestLine(41, 1_790_000_000.0, "SmolLM2", 4012, 0, 3840, "restored", "", 0.21),
    "restored 3,840 of 4,012 tokens from nas:50051 in 210 ms; the rest was never stored",
    (
        TierFinding("hot", "mlx-lm 0.32.2", True, 4012, reason="evicted", detail="evicted 3 s before", gone_unix_s=1e9),
        TierFinding("kv", "nas:50051", True, 4011, 3840, 3840, 5 << 20, (), {"damaged": 2}, 0.003, "other", LONG),
    ),
    "0123456789ab", "fedcba9876543210", "int8", 20, 5 << 20, 0.2, 9.5, ("kv_bits",), "mlx-lm 0.32.2",
)  # fmt: skip


def test_without_an_agent_it_exits_with_3(run):
    config_file(Path.cwd(), kv=1, ssm=2, inference=3)
    ran = run("explain")
    assert ran.code == 3
    assert "127.0.0.1:3" in ran.err


@pytest.mark.parametrize("words", [(), ("7",), ("--list",)])
def test_a_script_reads_a_document_also_without_an_agent(run, words):
    config_file(Path.cwd(), kv=1, ssm=2, inference=3)
    ran = run("explain", "--json", *words)
    assert ran.code == 3
    told = json.loads(ran.out)
    assert told["schema"] == "tierkv.explain/1"
    assert told["error"]["kind"] == "Unreachable"
    assert "127.0.0.1:3" in told["error"]["message"]
    assert told["requests"] == [] if words == ("--list",) else told["request"] is None


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "7", "--list"),
        ("explain", "--list", "--prompt", "x"),
        ("explain", "--list", "--limit", "0"),
        ("explain", "--tokenizer", "x"),
        ("explain", "--model", "x"),
        ("explain", "-3"),
        ("explain", "--prompt", "absent.txt"),
    ],
)
def test_what_makes_no_sense_exits_with_2(run, words):
    assert run(*words).code == 2


def test_token_ids_are_read_as_json_or_as_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "ids"
    for text in ("[1, 2, -3]", "1 2\n-3\n"):
        file.write_text(text)
        assert prompt_ids(str(file), "") == [1, 2, -3]
    monkeypatch.setattr("sys.stdin", io.StringIO("[4, 5]"))
    assert prompt_ids("-", "") == [4, 5]


@pytest.mark.parametrize("text", ["", "{}", "a text without a tokenizer", '["x"]', "[[1]]", "12"])
def test_what_is_no_list_of_ids_is_refused_with_a_hint(tmp_path: Path, text: str):
    file = tmp_path / "ids"
    file.write_text(text)
    if text == "12":
        assert prompt_ids(str(file), "") == [12]
        return
    with pytest.raises(UsageError, match="--tokenizer"):
        prompt_ids(str(file), "")


def test_a_missing_or_broken_tokenizer_is_a_usage_error(tmp_path: Path):
    file = tmp_path / "text"
    file.write_text("a text")
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        prompt_ids(str(file), str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="not a tokenizer"):
        prompt_ids(str(file), str(tmp_path))


def test_the_sentence_comes_first_and_the_table_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    lines = explanation_lines(EXPLAINED, Style(io.StringIO()))
    assert lines[0] == EXPLAINED.sentence
    assert any(line.startswith("TIER") for line in lines)
    assert all(len(line) <= 120 for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "[damaged 2]" in text
    assert "expected: restoring 200 ms, computing 9.5 s" in text
    assert "kv_bits (none there, 8 here)" in text


def test_the_document_has_times_and_nulls():
    told = json.loads(json.dumps(as_json(EXPLAINED), allow_nan=False))
    assert told["request"]["time"].endswith("Z")
    assert told["tiers"][0]["gone"] == "2001-09-09T01:46:40.000Z"
    assert told["tiers"][1]["gone"] is None
    assert told["tiers"][1]["refused"] == {"damaged": 2}
