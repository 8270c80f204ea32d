"""What the demonstration found: a table for people, one JSON document for programs."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from dataclasses import asdict, dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierkv.demo.blas import usable_cores
from tierkv.demo.measure import Comparison, Phase, Run
from tierkv.demo.models import title
from tierkv.demo.progress import PipeConsole
from tierkv.units import format_duration, format_size

_PHASES: dict[Phase, str] = {
    "cold": "cold",
    "hot": "hot",
    "restored": "restored",
    "next_turn": "next turn",
}


@dataclass(slots=True)
class Findings:
    """Everything measured so far, and what went wrong."""

    fast_blas: bool = False
    measured: list[Comparison] = field(default_factory=list[Comparison])
    failures: list[str] = field(default_factory=list[str])


def show(found: Findings, as_json: bool) -> None:
    """The findings are on stdout, the failures on stderr too."""
    if as_json:
        sys.stdout.write(document(found) + "\n")
    elif found.measured:
        print_table(found, PipeConsole())
    for failure in found.failures:
        sys.stderr.write(f"tierkv demo: {failure}\n")


def document(found: Findings) -> str:
    """The findings as ``tierkv.demo/1``: seconds are floats, bytes integers."""
    whole = {
        "schema": "tierkv.demo/1",
        "machine": {
            "cores": usable_cores(),
            "system": platform.system(),
            "processor": platform.machine(),
            "python": platform.python_version(),
            "mlx": _version("mlx"),
            "mlx_lm": _version("mlx-lm"),
            "fast_blas": found.fast_blas,
        },
        "runs": [asdict(run) for one in found.measured for run in one.runs],
        "models": [_without_runs(one) for one in found.measured],
        "failures": found.failures,
    }
    return json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False)


def _without_runs(one: Comparison) -> dict[str, object]:
    return {**{name: value for name, value in asdict(one).items() if name != "runs"}, "ratio": one.ratio}


def print_table(found: Findings, console: Console) -> None:
    """A table a prompt, a row a measured request, and a sentence or two below."""
    for one in found.measured:
        table = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            padding=(0, 1, 0, 0),
            title=Text(f"{one.model}: {title(one.model)}", style="bold"),
            title_justify="left",
        )
        for heading in ("phase", "codec"):
            table.add_column(heading, no_wrap=True)
        for heading in ("tokens", "cached", "TTFT", "faster", "moved", "ratio", "text"):
            table.add_column(heading, no_wrap=True, justify="right")
        for run in one.runs:
            table.add_row(*(Text(cell) for cell in _row(one, run)))
        console.print(table)
        console.print(Text(_sentence(one) + "\n"))


def _row(one: Comparison, run: Run) -> list[str]:
    moved = run.moved_bytes > 0
    return [
        _PHASES[run.phase],
        run.codec if moved else "",
        f"{run.tokens:,}",
        f"{run.cached_tokens:,}",
        format_duration(run.ttft_s),
        "" if run.phase == "cold" else f"{one.runs[0].ttft_s / run.ttft_s:.1f}x",
        format_size(run.moved_bytes) if moved else "",
        f"{one.ratio:.2f}" if run.phase == "restored" else "",
        ("same" if one.same_text else "DIFFERS") if run.phase == "restored" else "",
    ]


def _sentence(one: Comparison) -> str:
    same = "are the same to the last bit" if one.max_logit_diff == 0 else f"differ by up to {one.max_logit_diff:.2g}"
    return (
        f"{format_size(one.stored_bytes)} went to the vaults, and {format_size(one.state_bytes)} of float32 state came "
        f"back as {format_size(one.restored_bytes)} (ratio {one.ratio:.2f}). Against the state that never left, the "
        f"log probabilities of the answer {same}. The answer begins: {' '.join(one.text.split())!r}"
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
