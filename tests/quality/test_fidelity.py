"""Decibels, divergence and rounding, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tierkv.state.fidelity import Divergence, as_float32, snr_db, to_bfloat16


def test_snr_is_ten_times_the_log_of_energies():
    assert snr_db(np.array([3.0, 4.0]), np.array([3.0, 4.5])) == pytest.approx(10 * math.log10(25 / 0.25))
    assert snr_db(np.ones(4), np.ones(4)) == math.inf
    assert math.isnan(snr_db(np.zeros(2), np.ones(2)))


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even():
    """1 + 2^-8 lies half way between 1 and 1 + 2^-7: to 1, whose last bit is even; 1 + 3 * 2^-8 goes up."""
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -2.5, 0.0], np.float32)
    back = as_float32(to_bfloat16(values), "bfloat16")
    np.testing.assert_array_equal(back, np.array([1.0, 1.0, 1 + 2**-6, -2.5, 0.0], np.float32))


def test_equal_runs_do_not_diverge():
    logits = np.random.default_rng(0).standard_normal((70, 11)).astype(np.float32)
    divergence = Divergence()
    divergence.add(logits, logits, np.zeros(70, np.int64))
    assert (divergence.positions, divergence.kl_mean, divergence.top1_fraction) == (70, 0.0, 1.0)
    assert divergence.perplexity_change_fraction == 0.0


def test_divergence_of_two_coins():
    """p = (1/2, 1/2), q = (1/4, 3/4): KL = ln 2 - (ln 3) / 2; the text was token 0 each time."""
    p, q = np.log([[0.5, 0.5]] * 3), np.log([[0.25, 0.75]] * 3)
    divergence = Divergence()
    divergence.add(p, q, np.zeros(3, np.int64))
    assert divergence.kl_mean == pytest.approx(math.log(2) - math.log(3) / 2)
    assert divergence.perplexity == pytest.approx(4.0)
    assert divergence.perplexity_change_fraction == pytest.approx(1.0)
    assert divergence.top1_fraction == 0.0
