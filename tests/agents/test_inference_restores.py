"""State goes out to vaults in other processes and comes back for exactly the prompts it serves."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from agent_processes import Cluster, Engine, assert_state, hybrid_layout, prompt, rows_layout, state_of

from tierkv.handoff.client import NotRestored, Restored
from tierkv.state.layout import LayerLayout, Layout

_weights = itertools.count()


@pytest.fixture(autouse=True)
def engines_end_with_the_test(shared: Cluster):
    yield
    shared.close_engines()


def new_engine(shared: Cluster, layout: Layout | None = None) -> Engine:
    """An engine with a model that no other test has."""
    return shared.engine(layout=layout, weights=b"model %d" % next(_weights)).ready()


def stores(shared: Cluster, name: str = "kv") -> int:
    return next(process for process in shared.processes if process.kind == "inference").tier(name).stores


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 1000])
def test_a_prompt_comes_back_to_the_token(shared: Cluster, n: int):
    engine = new_engine(shared)
    tokens = prompt(n + 1)
    engine.demote(tokens[:n])
    assert_state(engine.restore(tokens), engine.layout, tokens, n)


def test_the_last_token_is_left_to_the_engine(shared: Cluster):
    engine = new_engine(shared)
    tokens = prompt(512)
    engine.demote(tokens)
    assert_state(engine.restore(tokens), engine.layout, tokens, 511)


def test_the_next_turn_reuses_the_last_one_to_the_token(shared: Cluster):
    engine = new_engine(shared)
    turn_1 = prompt(700)
    engine.demote(turn_1)
    turn_2 = np.concatenate([turn_1, prompt(90, seed=5)])
    assert_state(engine.restore(turn_2), engine.layout, turn_2, 700)
    engine.demote(turn_2)
    turn_3 = np.concatenate([turn_2, prompt(300, seed=6)])
    assert_state(engine.restore(turn_3), engine.layout, turn_3, 790)


def test_what_is_possible_is_told_without_fetching_anything(shared: Cluster):
    engine = new_engine(shared)
    tokens = prompt(700)
    engine.demote(tokens[:600])
    agent = next(process for process in shared.processes if process.kind == "inference")
    before = agent.tier("kv").hits

    def possible(**options):
        asked = {"limit": 699, "expected": engine.layout.signature(), "budget_s": 5.0, **options}
        return engine.client.possible(engine.model, asked.pop("tokens", tokens), **asked)

    assert possible() == 600
    assert possible(limit=300) == 300
    assert possible(have=600) == 0
    assert possible(tokens=prompt(700, seed=9)) == 0
    assert possible(expected=hybrid_layout().signature()) == 0
    assert agent.tier("kv").hits == before
    assert_state(engine.restore(tokens), engine.layout, tokens, 600)


@pytest.mark.parametrize("place", [1, 100, 256, 300, 511, 600])
def test_diverging_inside_a_block_reuses_up_to_the_divergence(shared: Cluster, place: int):
    engine = new_engine(shared)
    tokens = prompt(650)
    engine.demote(tokens)
    other = tokens.copy()
    other[place] = 40_000
    assert_state(engine.restore(other), engine.layout, other, place)


def test_a_permuted_prompt_never_hits(shared: Cluster):
    engine = new_engine(shared)
    tokens = np.arange(600)
    engine.demote(tokens)
    for seed in range(5):
        shuffled = np.random.default_rng(seed).permutation(tokens)
        shuffled = shuffled[shuffled != 0]
        assert engine.restore(shuffled) == NotRestored("never_stored")


def test_a_shared_head_is_stored_once(shared: Cluster):
    engine = new_engine(shared)
    head = prompt(1000)
    before = stores(shared)
    engine.demote(np.concatenate([head, prompt(100, seed=1)]))
    assert stores(shared) - before == 5  # 1,100 tokens: four full blocks and a partial one
    offer = engine.demote(np.concatenate([head, prompt(100, seed=2)]))
    assert offer.rows_from == 768
    assert stores(shared) - before == 7  # the fourth block holds the first different token


def test_what_is_known_is_not_sent_again(shared: Cluster):
    engine = new_engine(shared)
    tokens = prompt(300)
    assert engine.demote(tokens).rows_from == 0
    offer = engine.offer(tokens)
    assert not offer.wanted
    assert offer.reason == "known"
    assert engine.offer(tokens[:256]).reason == "known"
    assert engine.offer(tokens[:290]).rows_from == 256


def test_rows_that_the_engine_has_are_not_brought(shared: Cluster):
    engine = new_engine(shared)
    tokens = prompt(1001)
    engine.demote(tokens)
    whole = engine.restore(tokens)
    part = engine.restore(tokens, have=600)
    assert isinstance(part, Restored)
    assert part.first_row == 600
    assert_state(part, engine.layout, tokens, 1000)
    assert part.bytes_moved < whole.bytes_moved / 1.5
    assert_state(engine.restore(tokens, have=600, rows_from=0), engine.layout, tokens, 1000)
    assert engine.restore(tokens, have=1000) == NotRestored("too_short")


def test_weights_of_equal_size_are_another_model(shared: Cluster):
    left = shared.engine(weights=b"x" * 5000).ready()
    right = shared.engine(weights=b"x" * 4999 + b"y").ready()
    tokens = prompt(300)
    left.demote(tokens)
    assert right.restore(tokens) == NotRestored("never_stored")
    assert_state(left.restore(tokens), left.layout, tokens, 299)


def test_another_cache_layout_is_a_miss(shared: Cluster):
    engine = new_engine(shared)
    tokens = prompt(300)
    engine.demote(tokens)
    other = Layout(tuple(LayerLayout("rows", "QuantizedKVCache", layer.arrays) for layer in engine.layout.layers))
    assert engine.restore(tokens, expected=other.signature()) == NotRestored("foreign_layout")
    assert_state(engine.restore(tokens, expected=None), engine.layout, tokens, 299)


@pytest.mark.parametrize("window", [False, True])
def test_a_hybrid_comes_back_at_its_checkpoints_only(shared: Cluster, window: bool):
    engine = new_engine(shared, hybrid_layout(window))
    tokens = prompt(900)
    engine.demote(tokens[:400])
    engine.demote(tokens[:811])
    got = engine.restore(tokens)
    assert_state(got, engine.layout, tokens, 811)
    assert got.scalars[1] == {"offset": 811, "_idx": 3}
    other = tokens.copy()
    other[810] = 40_000
    assert_state(engine.restore(other), engine.layout, other, 400)
    other[399] = 40_000
    assert engine.restore(other) == NotRestored("no_checkpoint")
    assert engine.restore(tokens, limit=399) == NotRestored("no_checkpoint")
    assert_state(engine.restore(tokens, limit=400), engine.layout, tokens, 400)


def test_a_model_of_recurrent_layers_only(shared: Cluster):
    engine = new_engine(shared, Layout(hybrid_layout().layers[1:2]))
    tokens = prompt(500)
    engine.demote(tokens[:256])
    engine.demote(tokens[:450])
    assert_state(engine.restore(tokens), engine.layout, tokens, 450)
    assert_state(engine.restore(tokens, expected=None), engine.layout, tokens, 450)


def test_a_hybrid_is_found_without_knowing_its_layout(shared: Cluster):
    """The first record tells the layout; nothing is restored without the checkpoints that it needs."""
    writer = new_engine(shared, hybrid_layout())
    tokens = prompt(600)
    writer.demote(tokens[:512])
    assert_state(writer.restore(tokens, expected=None), writer.layout, tokens, 512)


def test_two_engines_of_one_model_share_what_is_stored(shared: Cluster):
    weights = b"model %d" % next(_weights)
    first, second = (shared.engine(weights=weights).ready() for _ in range(2))
    tokens = prompt(1024)
    first.demote(tokens)
    results: list[object] = []
    engines = [first, second, *(shared.engine(weights=weights).ready() for _ in range(2))]
    threads = [threading.Thread(target=lambda e=e: results.append(e.restore(tokens))) for e in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got in results:
        assert_state(got, first.layout, tokens, 1023)


def test_bfloat16_and_other_dtypes_keep_their_bits(shared: Cluster):
    engine = new_engine(shared, rows_layout(dtype="bfloat16"))
    tokens = prompt(300)
    engine.demote(tokens)
    got = engine.restore(tokens)
    assert got.arrays[0, 0].dtype == np.uint16
    assert_state(got, engine.layout, tokens, 299)


def test_negative_ids_of_images_are_ids_like_others(shared: Cluster):
    engine = new_engine(shared)
    tokens = prompt(300)
    tokens[100:140] = -(1 << 59) - np.arange(40)
    engine.demote(tokens)
    assert_state(engine.restore(tokens), engine.layout, tokens, 299)


def test_a_queue_of_pending_records_is_read_too(cluster: Cluster):
    """With its vault gone, what is still in the queue is restored all the same: as much as is in it by then."""
    vault = cluster.vault()
    cluster.agent(vault)
    engine = cluster.engine().ready()
    vault.kill()
    tokens = prompt(700)
    engine.demote(tokens, stored=False)
    deadline = time.monotonic() + 20
    while isinstance(got := engine.restore(tokens), NotRestored) or got.position < 699:
        assert time.monotonic() < deadline, got
    assert_state(got, engine.layout, tokens, 699)


def test_a_hit_is_counted_where_people_look(shared: Cluster):
    engine = new_engine(shared)
    agent = next(process for process in shared.processes if process.kind == "inference")
    before = agent.tier("kv")
    tokens = prompt(800)
    engine.restore(tokens)
    engine.demote(tokens)
    engine.restore(tokens)
    after = agent.tier("kv")
    assert after.misses - before.misses == 1
    assert after.miss_reasons.get("never_stored", 0) - before.miss_reasons.get("never_stored", 0) == 1
    assert after.hits - before.hits == 1
    assert after.hit_tokens - before.hit_tokens == 799
    assert after.promote_s.total - before.promote_s.total == 1
    assert after.bytes_out > before.bytes_out
    assert after.stores - before.stores == 4
    snapshot = agent.snapshot()
    shown = next(each for each in snapshot.engines if each.prefill_tokens_saved == 799)
    assert (shown.kind, shown.build, shown.model, shown.attached) == ("toy", "toy 1.0", "toy", True)


def test_state_is_made_so_that_a_wrong_row_is_seen():
    """The oracle itself: one other token early changes all later rows."""
    tokens = prompt(300)
    other = tokens.copy()
    other[10] += 1
    left, right = state_of(rows_layout(), tokens)[0, 0], state_of(rows_layout(), other)[0, 0]
    assert (left[:, :, :10] == right[:, :, :10]).all()
    assert not (left[:, :, 10:] == right[:, :, 10:]).all(axis=(0, 1, 3)).any()
