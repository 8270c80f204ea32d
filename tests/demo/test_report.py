import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from tierkv.demo.measure import Comparison, Run
from tierkv.demo.report import Findings, document, print_table, show

RUNS = (
    Run("hybrid", 4096, "cold", "int8", 12.0, 0),
    Run("hybrid", 4096, "hot", "int8", 0.2, 4095),
    Run("hybrid", 4096, "restored", "int8", 0.25, 4095, 3 << 20),
    Run("hybrid", 4128, "next_turn", "int8", 0.5, 4095, 3 << 20),
)
ONE = Comparison(
    model="hybrid",
    tokens=4096,
    codec="int8",
    speedup=48.0,
    hot_speedup=60.0,
    next_turn_speedup=24.0,
    same_text=True,
    max_logit_diff=0.0,
    stored_bytes=5 << 20,
    restored_bytes=3 << 20,
    state_bytes=9 << 20,
    text="one [bold]two[/bold]\nthree",
    runs=RUNS,
)


def shown(one: Comparison) -> str:
    out = io.StringIO()
    print_table(Findings(measured=[one]), Console(file=out, width=80))
    return out.getvalue()


def test_document_is_the_documented_one():
    got = json.loads(document(Findings(measured=[ONE], fast_blas=True)))
    assert got["schema"] == "tierkv.demo/1"
    assert [(run["phase"], run["ttft_s"], run["cached_tokens"]) for run in got["runs"]] == [
        ("cold", 12.0, 0), ("hot", 0.2, 4095), ("restored", 0.25, 4095), ("next_turn", 0.5, 4095),
    ]  # fmt: skip
    assert all({"model", "tokens", "phase", "codec", "ttft_s", "cached_tokens"} <= run.keys() for run in got["runs"])
    (model,) = got["models"]
    assert (model["model"], model["codec"], model["speedup"], model["same_text"]) == ("hybrid", "int8", 48.0, True)
    assert model["max_logit_diff"] == 0.0
    assert model["ratio"] == 3.0
    assert "runs" not in model
    assert got["machine"]["fast_blas"] is True
    assert got["failures"] == []


def test_table_fits_80_columns_with_every_number_whole():
    lines = shown(ONE).splitlines()
    assert max(map(len, lines)) <= 80
    (restored,) = (line for line in lines if line.startswith("restored"))
    cells = ["restored", "int8", "4,096", "4,095", "250 ms", "48.0x", "3.0 MiB", "3.00", "same"]
    assert restored.split() == " ".join(cells).split()
    (cold,) = (line for line in lines if line.startswith("cold"))
    assert cold.split() == ["cold", "4,096", "0", "12", "s"]


def test_text_of_a_model_is_never_markup():
    assert "[bold]two[/bold]" in shown(ONE)


@pytest.mark.parametrize(
    ("difference", "words"), [(0.0, "are the same to the last bit"), (0.0123, "differ by up to 0.012")]
)
def test_sentence_says_how_the_logits_compare(difference: float, words: str):
    assert words in " ".join(shown(replace(ONE, max_logit_diff=difference)).split())


def test_other_text_stands_out():
    assert "DIFFERS" in shown(replace(ONE, same_text=False))


def test_failures_go_to_stderr_and_into_the_document(capsys):
    show(Findings(failures=["the vault is gone"]), as_json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["failures"] == ["the vault is gone"]
    assert captured.err == "tierkv demo: the vault is gone\n"
