"""What was measured, as a table and as the document ``tierkv.quality/1``."""

from __future__ import annotations

import math
from typing import Any

from tierkv.quality.measure import CodecQuality, DepthQuality, Measured


def document(found: Measured) -> dict[str, Any]:
    """Plain JSON values. A decibel value of null stands for "every bit came back"."""
    return {
        "schema": "tierkv.quality/1",
        "model": found.model,
        "input_dtype": found.input_dtype,
        "context_tokens": found.tokens,
        "evaluated_tokens_a_depth": found.evaluated,
        "codecs": [_codec(each) for each in found.codecs],
    }


def _codec(each: CodecQuality) -> dict[str, Any]:
    divergence = each.divergence
    return {
        "codec": each.codec,
        "ratio": each.ratio,
        "kl_mean": divergence.kl_mean,
        "top1_fraction": divergence.top1_fraction,
        "perplexity_change_fraction": divergence.perplexity_change_fraction,
        "snr_db_min": _finite(each.snr_db_min),
        "snr_db_median": _finite(each.snr_db_median),
        "depths": [_depth(one) for one in each.depths],
    }


def _depth(each: DepthQuality) -> dict[str, Any]:
    return {
        "depth": each.depth,
        "ratio": each.ratio,
        "kl_mean": each.divergence.kl_mean,
        "top1_fraction": each.divergence.top1_fraction,
        "perplexity": each.divergence.perplexity,
        "perplexity_change_fraction": each.divergence.perplexity_change_fraction,
        "snr_db_min": _finite(each.worst.snr_db),
        "layers": [
            {"layer": one.layer, "array": one.array, "snr_db": _finite(one.snr_db)} for one in each.layers
        ],
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def lines(found: Measured) -> list[str]:
    """A table of codecs and depths, in at most 80 columns."""
    evaluated = f"{found.evaluated} tokens evaluated at each depth"
    out = [f"{found.model}: attention state of {found.input_dtype}, {evaluated}", ""]
    out.append(f"{'codec':<10}{'depth':>7}{'ratio':>7}{'KL':>9}{'top-1':>8}{'perplexity':>12}{'SNR worst':>11}  layer")
    return out + [_line(each.codec, one) for each in found.codecs for one in each.depths]


def _line(codec: str, one: DepthQuality) -> str:
    divergence, worst = one.divergence, one.worst
    exact = math.isinf(worst.snr_db)
    snr = "exact" if exact else f"{worst.snr_db:.1f} dB"
    place = "" if exact else f"  {worst.layer} {worst.array}"
    return (
        f"{codec:<10}{one.depth:>7,}{one.ratio:>7.2f}{divergence.kl_mean:>9.1e}{divergence.top1_fraction:>8.1%}"
        f"{divergence.perplexity_change_fraction:>+12.2%}{snr:>11}{place}"
    )
