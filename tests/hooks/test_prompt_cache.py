"""mlx-lm's prompt cache with an agent behind it: what comes back, what leaves, what is refused, what never breaks."""

import copy
import os
import socket
import threading
import time
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from fake_agent import FakeAgent
from mlx_lm.models.cache import KVCache, LRUPromptCache, make_prompt_cache
from tiny_mlx import prompt, tiny_model

from tierkv.errors import HandoffError, UnsupportedState
from tierkv.handoff.client import HandoffClient
from tierkv.handoff.mover import Mover
from tierkv.hooks.counters import HotCounters
from tierkv.hooks.demote import Demoter
from tierkv.hooks.memory import MemoryReading, MemoryRule
from tierkv.hooks.mlx_models import ModelBook, seen_files
from tierkv.hooks.promote import Promoter
from tierkv.hooks.prompt_cache import Tiers, tiered_cache_class
from tierkv.state import mlx_cache


def test_this_is_the_mlx_lm_that_was_asked_for():
    assert mlx_lm.__version__.startswith(os.environ.get("TIERKV_TEST_MLX_LM", "0."))


PLENTY = MemoryReading(0, 1 << 40)


class Engine:
    """A model, its tiered prompt cache and the parts behind it, all on this thread but the mover."""

    def __init__(self, path, folder, model, *, size=10, read=lambda: PLENTY, args=None, key=None):
        self.client = HandoffClient(path, "mlx-lm", "test")
        self.mover = Mover(self.client)
        self.counters = HotCounters()
        self.book = ModelBook(self.client)
        self.model, self.key = model, key or (str(folder), None, None)
        self.provider = SimpleNamespace(cli_args=args or SimpleNamespace(kv_bits=None))
        self.book.loaded(self.key, seen_files(self.key), self.provider, make_prompt_cache(model))
        self.tiers = Tiers(
            self.client, self.book, Demoter(self.client, self.mover, self.book, self.counters),
            Promoter(self.client, self.book, self.counters), self.counters, MemoryRule(read),
        )  # fmt: skip
        self.cache_class = tiered_cache_class(LRUPromptCache, self.tiers)
        self.cache = self.cache_class(size)
        self.kept = {}

    def computed(self, tokens, cache=None):
        cache = make_prompt_cache(self.model) if cache is None else cache
        self.model(mx.array([tokens]), cache=cache)
        mx.eval([c.state for c in cache])
        return cache

    def insert(self, tokens, cache=None, **named):
        """Computes and stores ``tokens``; the state that never left stays in ``kept``."""
        cache = self.computed(tokens) if cache is None else cache
        self.kept[tuple(tokens)] = copy.deepcopy(cache)
        self.cache.insert_cache(self.key, list(tokens), cache, **named)
        assert self.mover.drain(60)
        return cache

    def fetch(self, tokens):
        cache, rest = self.cache.fetch_nearest_cache(self.key, list(tokens))
        assert rest, "a fully covered prompt ends mlx-lm's generation thread"
        assert list(rest) == list(tokens[len(tokens) - len(rest) :])
        if cache is not None:
            assert mlx_cache.position(cache) == len(tokens) - len(rest)
        return cache, len(tokens) - len(rest)

    def logits(self, cache, tokens):
        out = self.model(mx.array([list(tokens)]), cache=cache)
        return np.array(out[:, -1, :].astype(mx.float32)).view(np.uint32)

    def close(self):
        self.mover.close()
        self.client.close()


@pytest.fixture
def engine_of(agent, model_folders):
    made = []

    def make(name="llama", *, running=agent, **named):
        engine = Engine(running.path, model_folders(name), tiny_model(name), **named)
        made.append(engine)
        assert engine.client.wait_available(60)
        return engine

    yield make
    for engine in made:
        engine.close()


def ids(n, seed=1):
    """The first n tokens of text number ``seed``."""
    return prompt(400, seed).tolist()[0][:n]


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


# --- coming back --------------------------------------------------------------------------------


def test_an_evicted_prompt_comes_back_bit_for_bit(agent, engine_of):
    engine = engine_of(size=1)
    first, second = ids(300), ids(80, seed=2)
    engine.insert(first)
    engine.insert(second)
    assert len(engine.cache) == 1
    asked = [*first, 3, 4, 5]
    cache, have = engine.fetch(asked)
    assert have == 300
    np.testing.assert_array_equal(
        engine.logits(cache, asked[300:]), engine.logits(engine.kept[tuple(first)], asked[300:])
    )
    assert engine.counters.hits == {"restored": 1}
    assert engine.counters.evictions == 1
    assert engine.counters.restored_tokens == 300


def test_the_same_prompt_again_keeps_its_last_token_to_compute(engine_of):
    engine = engine_of(size=1)
    first = ids(300)
    engine.insert(first)
    engine.insert(ids(80, seed=2))
    cache, have = engine.fetch(first)
    assert have == 299
    kept = engine.kept[tuple(first)]
    kept[0].trim(1), kept[1].trim(1)
    np.testing.assert_array_equal(engine.logits(cache, first[299:]), engine.logits(kept, first[299:]))


def test_local_rows_are_kept_and_only_the_rest_is_fetched(agent, engine_of):
    engine = engine_of(size=1)
    whole, other = ids(300), ids(300)[:120] + ids(30, seed=3)
    # One computation for the common head: a BLAS rounds the same rows otherwise in a batch of another size.
    head = engine.computed(whole[:120])
    engine.insert(whole, engine.computed(whole[120:], copy.deepcopy(head)))
    engine.insert(other, engine.computed(other[120:], head))
    asked = [*whole, 9]
    cache, have = engine.fetch(asked)
    assert have == 300
    assert agent.ops("restore")[-1]["rows_from"] == 120
    assert engine.counters.restored_tokens == 180
    np.testing.assert_array_equal(
        engine.logits(cache, asked[300:]), engine.logits(engine.kept[tuple(whole)], asked[300:])
    )


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
def test_checkpoints_come_back_only_where_they_were_taken(engine_of, name):
    engine = engine_of(name, size=1)
    first = ids(300)
    engine.insert(first)
    engine.insert(ids(90, seed=2))
    assert engine.fetch(first) == (None, 0)
    cache, have = engine.fetch([*first, 7, 8])
    assert have == 300
    np.testing.assert_array_equal(engine.logits(cache, [7, 8]), engine.logits(engine.kept[tuple(first)], [7, 8]))


def test_nothing_is_asked_for_what_is_quickly_computed(agent, engine_of):
    engine = engine_of()
    engine.insert(ids(300))
    engine.fetch(ids(305))
    engine.fetch(ids(12, seed=5))
    assert agent.ops("restore") == []
    assert engine.counters.hits == {"shorter": 1, "none": 1}


def test_a_hot_hit_keeps_the_cold_copy_young(agent, engine_of):
    engine = engine_of()
    engine.insert(ids(300))
    engine.fetch(ids(305))
    wait_for(lambda: agent.ops("hit"))
    assert agent.ops("hit")[0]["position"] == 300


# --- the fully covered prompt -------------------------------------------------------------------


def test_a_fully_covered_prompt_is_trimmed_by_one(engine_of):
    engine = engine_of()
    engine.insert(ids(40))
    cache, have = engine.fetch(ids(40))
    assert (have, mlx_cache.position(cache)) == (39, 39)
    assert engine.counters.hits == {"exact": 1}


def test_a_fully_covered_hybrid_uses_the_checkpoint_before(engine_of):
    engine = engine_of("qwen3_next")
    tokens = ids(40)
    engine.insert(tokens[:30])
    engine.insert(tokens)
    cache, have = engine.fetch(tokens)
    assert have == 30
    np.testing.assert_array_equal(
        engine.logits(cache, tokens[30:]), engine.logits(engine.kept[tuple(tokens[:30])], tokens[30:])
    )
    assert engine.counters.hits == {"shorter": 1}


def test_a_fully_covered_hybrid_without_a_checkpoint_is_computed(engine_of):
    engine = engine_of("qwen3_next")
    engine.insert(ids(40))
    assert engine.fetch(ids(40)) == (None, 0)


def test_a_covered_prompt_of_one_token_is_computed(engine_of):
    engine = engine_of()
    engine.insert([5])
    assert engine.fetch([5]) == (None, 0)


def test_an_empty_prompt_does_no_harm(engine_of):
    engine = engine_of()
    cache, rest = engine.cache.fetch_nearest_cache(engine.key, [])
    assert cache is None
    assert list(rest) == []


# --- leaving ------------------------------------------------------------------------------------


def test_entries_leave_when_they_are_made(agent, engine_of):
    engine = engine_of()
    engine.insert(ids(300))
    wait_for(lambda: agent.entries)
    assert agent.entries[0].position == 300
    assert engine.counters.handed_over_bytes == 2 * 2 * 2 * 300 * 16 * 4  # layers, K and V, heads, rows, width, float32
    assert engine.counters.evaluate_s > 0
    assert engine.counters.copy_s > 0


def test_entries_leave_when_they_are_evicted_if_asked_so(tmp_path, engine_of):
    agent = FakeAgent(tmp_path / "evict.sock", demote="on-evict").start()
    engine = engine_of(running=agent, size=1)
    engine.insert(ids(300))
    assert agent.ops("offer") == []
    engine.insert(ids(80, seed=2))
    wait_for(lambda: agent.entries)
    assert [entry.position for entry in agent.entries] == [300]
    assert engine.fetch(ids(303))[1] == 300
    engine.close()
    agent.stop()


def test_what_the_agent_could_not_take_yet_is_offered_again_at_eviction(agent, engine_of):
    engine = engine_of(size=1)
    agent.offer_reason = "identity_pending"
    engine.insert(ids(300))
    assert engine.counters.refusals == {"identity_pending": 1}
    agent.offer_reason = ""
    engine.insert(ids(80, seed=2))
    wait_for(lambda: len(agent.entries) == 2)
    assert sorted(entry.position for entry in agent.entries) == [80, 300]


@pytest.mark.parametrize("passing", ["no_agent", "identity_pending"])
def test_what_the_agent_did_not_take_is_offered_again_with_the_next_entry_that_it_takes(agent, engine_of, passing):
    """A briefly slow agent, or one that still hashes the weights, does not cost the write-behind."""
    engine = engine_of()
    takes = agent.on_offer
    if passing == "no_agent":
        agent.on_offer = _never
        engine.client.settings = {**engine.client.settings, "offer_budget_s": 0.05}
    else:
        agent.offer_reason = passing
    engine.insert(ids(300))
    engine.insert(ids(200, seed=2))
    assert engine.counters.refusals == {passing: 2}
    agent.on_offer, agent.offer_reason = takes, ""
    engine.client.settings = {**engine.client.settings, "offer_budget_s": 5.0}
    engine.insert(ids(90, seed=3))
    wait_for(lambda: len(agent.entries) == 3)
    assert sorted(entry.position for entry in agent.entries) == [90, 200, 300]
    offers = len(agent.ops("offer"))
    engine.insert(ids(100, seed=4))
    assert len(agent.ops("offer")) == offers + 1, "each once"
    assert engine.counters.refusals == {passing: 2}


def test_offers_made_again_stop_at_the_first_that_is_not_answered(agent, engine_of):
    engine = engine_of()
    agent.offer_reason = "identity_pending"
    for seed in range(6):
        engine.insert(ids(80, seed=seed))
    assert len(agent.ops("offer")) == 6, "an agent that does not take the newest is not asked about the others"
    agent.offer_reason = ""
    engine.insert(ids(80, seed=6))
    assert len(agent.ops("offer")) == 6 + 1 + 4
    engine.insert(ids(80, seed=7))
    wait_for(lambda: len(agent.entries) == 8)


def test_what_was_lost_on_its_way_is_offered_again_at_eviction(agent, engine_of):
    engine = engine_of(size=1)
    closed = []

    async def closes(connection, message):
        closed.append(message)
        raise HandoffError("hook", "the test closes this connection")

    agent.on_begin = closes
    engine.insert(ids(300))
    wait_for(lambda: closed)
    assert agent.entries == []
    del agent.on_begin
    wait_for(lambda: agent.connections >= 3)
    assert engine.client.wait_available(15)
    engine.insert(ids(80, seed=2))
    wait_for(lambda: len(agent.entries) == 2)
    assert sorted(entry.position for entry in agent.entries) == [80, 300]


def test_what_the_agent_has_is_not_sent_again(agent, engine_of):
    engine = engine_of(size=1)
    engine.insert(ids(300))
    wait_for(lambda: agent.entries)
    engine.insert(ids(300))
    engine.insert(ids(80, seed=2))
    assert [fields["position"] for fields in agent.ops("offer")] == [300, 300, 300, 80]  # the third as it is evicted
    wait_for(lambda: len(agent.entries) == 2)
    assert len(agent.ops("begin")) == 2
    assert engine.counters.refusals == {}


def test_a_sampled_last_token_is_not_taken_for_a_computed_one(agent, engine_of):
    engine = engine_of()
    tokens = ids(100)
    engine.insert([*tokens, 5], cache=engine.computed(tokens))
    wait_for(lambda: agent.entries)
    assert agent.entries[0].position == 100
    assert agent.entries[0].tokens.tolist() == tokens


def test_a_cache_that_does_not_fit_its_tokens_stays(agent, engine_of):
    engine = engine_of()
    engine.insert(ids(102), cache=engine.computed(ids(100)))
    engine.insert(ids(49, seed=2), cache=engine.computed(ids(50, seed=2)))
    assert engine.counters.refusals == {"position_mismatch": 2}
    assert agent.ops("offer") == []


def test_a_pure_recurrent_model_is_refused_since_its_cache_says_no_position(engine_of):
    engine = engine_of("mamba2")
    engine.cache.insert_cache(engine.key, ids(40), engine.computed(ids(40)))
    assert engine.counters.refusals == {"position_unknown": 1}


def test_an_unknown_cache_class_is_refused_and_served(agent, engine_of):
    class Special(KVCache):
        pass

    engine = engine_of()
    layers = [Special(), Special()]
    engine.insert(ids(60), cache=engine.computed(ids(60), layers))
    assert engine.counters.refusals == {"unsupported_class": 1}
    cache, rest = engine.cache.fetch_nearest_cache(engine.key, ids(62))
    assert type(cache[0]) is Special
    assert list(rest) == ids(62)[60:]
    cache, rest = engine.cache.fetch_nearest_cache(engine.key, ids(60))
    assert (cache[0].offset, list(rest)) == (59, ids(60)[59:])


def test_short_prompts_stay(agent, engine_of):
    engine = engine_of()
    engine.insert(ids(15))
    assert engine.counters.refusals == {"too_short": 1}


def test_an_image_is_told_and_no_entry_ends_inside_it(agent, engine_of):
    engine = engine_of()
    image = -(10**17)
    tokens = [*ids(20), *[image] * 10, *ids(20, seed=2)]
    engine.cache.insert_cache(engine.key, tokens, engine.computed([max(t, 0) for t in tokens]))
    assert agent.ops("offer")[0]["media"] == [[20, 10, image.to_bytes(8, "little", signed=True).hex()]]
    engine.cache.insert_cache(engine.key, tokens[:25], engine.computed([max(t, 0) for t in tokens[:25]]))
    assert engine.counters.refusals == {"inside_media": 1}


# --- memory -------------------------------------------------------------------------------------


def test_the_threshold_evicts_older_entries_until_use_is_below_it(engine_of):
    use = {"bytes": 500}
    engine = engine_of(read=lambda: MemoryReading(use["bytes"], 1_000_000))
    for seed in (1, 2, 3):
        engine.insert(ids(100, seed))
    one = engine.cache.nbytes // 3
    use["bytes"] = 600_000 + one + 1
    engine.insert(ids(100, seed=4))
    assert len(engine.cache) == 2
    assert engine.counters.evictions == 2
    assert engine.fetch([*ids(100, seed=4), 1])[1] == 100
    assert engine.counters.note == ""


def test_evicted_bytes_that_the_system_does_not_show_yet_are_not_evicted_twice(engine_of):
    engine = engine_of(read=lambda: MemoryReading(600_100, 1_000_000))
    for seed in (1, 2, 3, 4):
        engine.insert(ids(100, seed))
    assert engine.counters.evictions == 1
    assert len(engine.cache) == 3


def test_the_newest_entry_always_stays_and_the_rest_if_nothing_helps(engine_of, caplog):
    engine = engine_of(read=lambda: MemoryReading(9 << 30, 10 << 30))
    with caplog.at_level("WARNING", "tierkv"):
        for seed in (1, 2, 3):
            engine.insert(ids(100, seed))
    assert len(engine.cache) == 3
    assert engine.counters.note == "threshold unreachable: 9.0 GiB are not cache"
    assert [r.getMessage() for r in caplog.records].count(engine.counters.note) == 1


def test_the_threshold_follows_the_agent_while_it_runs(agent, engine_of):
    engine = engine_of(read=lambda: MemoryReading(500_000, 1_000_000))
    engine.insert(ids(100))
    engine.insert(ids(100, seed=2))
    assert engine.counters.evictions == 0
    agent.settings["memory_threshold"] = 0.49
    engine.client.report_hot({})
    wait_for(lambda: engine.client.report_hot({}) or engine.client.settings["memory_threshold"] == 0.49)
    engine.insert(ids(100, seed=3))
    assert engine.counters.evictions > 0


def test_an_idle_engine_follows_a_lowered_mark_one_entry_at_a_time_and_keeps_the_newest(engine_of):
    use = {"bytes": 500_000}
    engine = engine_of(read=lambda: MemoryReading(use["bytes"], 1_000_000))
    for seed in (1, 2, 3):
        engine.insert(ids(100, seed))
    one = engine.cache.nbytes // 3
    engine.cache.idle()
    assert engine.counters.evictions == 0
    use["bytes"] = 600_000 + one + 1
    left = []

    def idle():
        engine.cache.idle()
        if not left or left[-1] != len(engine.cache):
            left.append(len(engine.cache))
        return len(engine.cache) == 1

    wait_for(idle)
    assert left == [3, 2, 1]
    assert engine.counters.evictions == 2
    assert engine.fetch([*ids(100, seed=3), 1])[1] == 100


def test_a_cache_without_entries_is_idle(engine_of):
    engine_of(read=lambda: MemoryReading(900_000, 1_000_000)).cache.idle()


# --- nothing breaks the engine ------------------------------------------------------------------


def test_without_an_agent_the_engine_goes_on(tmp_path, model_folders):
    engine = Engine(tmp_path / "nobody.sock", model_folders("llama"), tiny_model("llama"), size=1)
    engine.insert(ids(300))
    engine.insert(ids(80, seed=2))
    assert engine.fetch(ids(303)) == (None, 0)
    assert engine.counters.refusals == {"no_agent": 3}  # the first one again when it is evicted
    engine.fetch(ids(20))
    told = [body["reason"] for op, body, _ in engine.client._outbox if op == "served"]
    assert told == ["no_agent", "too_short"], "what an agent that comes is told of these requests"
    engine.close()


def test_an_agent_that_ends_and_comes_back_is_used_again(agent, engine_of):
    engine = engine_of(size=1)
    agent.stop()
    engine.insert(ids(300))
    assert engine.fetch(ids(303))[1] == 300
    wait_for(lambda: not engine.client.available)  # or the dead connections count as the ones to the next agent
    again = FakeAgent(agent.path).start()
    try:
        assert engine.client.wait_available(15)
        engine.insert(ids(90, seed=3))
        wait_for(lambda: len(again.entries) == 2)
        assert engine.fetch(ids(303))[1] == 300
    finally:
        engine.close()
        again.stop()
        agent.start = agent.stop = lambda: None


@pytest.mark.parametrize("greets", [True, False])
def test_a_hung_agent_costs_no_more_than_its_budgets(tmp_path, model_folders, agent, greets):
    """Hangs after its greeting (as a stopped process does), or before it."""
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(str(tmp_path / "hung.sock"))
    silent.listen()
    hung = FakeAgent(tmp_path / "hung2.sock", restore_budget_s=0.3, offer_budget_s=0.1) if greets else None
    if hung is not None:
        hung.start()
        hung.on_offer = hung.on_restore = _never
    path = hung.path if hung is not None else tmp_path / "hung.sock"
    engine = Engine(path, model_folders("llama"), tiny_model("llama"), size=1)
    if hung is not None:
        assert engine.client.wait_available(60)
    started = time.monotonic()
    engine.insert(ids(300))
    engine.insert(ids(80, seed=2))
    assert engine.fetch(ids(303)) == (None, 0)
    assert time.monotonic() - started < 5
    engine.close()
    silent.close()
    if hung is not None:
        hung.stop()


async def _never(connection, message):
    return None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda arrays: {k: a[..., :8] for k, a in arrays.items()}, None),
        (lambda arrays: dict(list(arrays.items())[:-1]), None),
    ],
)
def test_state_that_does_not_fit_is_not_used(agent, engine_of, damage, reason):
    engine = engine_of(size=1)
    engine.insert(ids(300))
    engine.insert(ids(80, seed=2))
    agent.damage = damage
    assert engine.fetch(ids(303)) == (None, 0)
    assert engine.counters.hits == {"none": 1}
    assert sum(engine.counters.not_restored.values()) == 1


def test_state_of_another_layout_is_not_used(agent, engine_of):
    engine = engine_of(size=1)
    engine.insert(ids(300))
    engine.insert(ids(80, seed=2))
    entry = agent.entries[0]
    entry.layout_blob = entry.layout_blob.replace(b"KVCache", b"FooCache")
    assert engine.fetch(ids(303)) == (None, 0)
    assert engine.counters.not_restored == {"foreign_layout": 1}


def test_a_lookup_of_mlx_lm_that_fails_is_a_miss(agent, engine_of, monkeypatch):
    engine = engine_of()
    agent.restore_reason = "never_stored"
    engine.insert(ids(40))
    monkeypatch.setattr(LRUPromptCache, "fetch_nearest_cache", lambda *_: 1 / 0)
    assert engine.fetch(ids(42)) == (None, 0)


def test_a_fault_of_our_own_is_logged_once_and_never_raised(engine_of, monkeypatch, caplog):
    engine = engine_of()
    monkeypatch.setattr(Demoter, "demote", lambda *_: 1 / 0)
    monkeypatch.setattr(Promoter, "promote", lambda *_: 1 / 0)
    with caplog.at_level("WARNING", "tierkv"):
        for seed in (1, 2, 3):
            engine.insert(ids(40, seed))
            engine.fetch(ids(42, seed))
    assert engine.counters.refusals == {"hook_error": 3}
    assert len([r for r in caplog.records if "ZeroDivisionError" in r.getMessage()]) == 2


def test_a_prompt_cache_of_another_build_is_refused():
    with pytest.raises(UnsupportedState, match=r"_trie\.pop"):
        tiered_cache_class(type("LRUPromptCache", (), {}), SimpleNamespace())


# --- models -------------------------------------------------------------------------------------


def test_the_announcement_says_which_files_were_loaded(agent, engine_of, model_folders):
    engine_of()
    wait_for(lambda: agent.announced)
    said = agent.announced[0]
    folder = model_folders("llama")
    assert {path for path, *_ in said["weights"]} == {
        str(folder.resolve() / "model.safetensors"), str(folder.resolve() / "config.json"),
    }  # fmt: skip
    assert said["config"] == (folder / "config.json").read_text()
    assert said["kv_bits"] == 0


def test_an_adapter_is_part_of_the_announcement(agent, engine_of, model_folders, tmp_path):
    (tmp_path / "adapters.safetensors").write_bytes(b"weights")
    (tmp_path / "adapter_config.json").write_text("{}")
    engine_of(key=(str(model_folders("llama")), str(tmp_path), None))
    wait_for(lambda: agent.announced)
    assert len(agent.announced[0]["adapter"]) == 2


def test_a_draft_model_is_part_of_the_announcement(agent, engine_of, model_folders):
    engine_of(key=(str(model_folders("llama")), None, str(model_folders("one_head"))))
    wait_for(lambda: agent.announced)
    paths = [path for path, *_ in agent.announced[0]["draft"]]
    assert paths
    assert all(path.startswith(str(model_folders("one_head"))) for path in paths)
    assert agent.announced[0]["weights"] != agent.announced[0]["draft"]


def test_a_draft_model_that_is_not_on_this_disk_is_served_without_tiers(agent, engine_of, model_folders, tmp_path):
    engine = engine_of(key=(str(model_folders("llama")), None, str(tmp_path / "nothing")))
    engine.insert(ids(40))
    assert engine.counters.refusals == {"model_files": 1}
    assert agent.announced == {}


def test_a_model_whose_files_changed_while_it_was_loaded_is_served_without_tiers(engine_of, model_folders):
    engine = engine_of()
    before = seen_files(engine.key)
    other = before.__class__((before.weights[0]._replace(size_bytes=1), *before.weights[1:]), ())
    engine.book.loaded(engine.key, other, engine.provider, make_prompt_cache(engine.model))
    engine.insert(ids(40))
    assert engine.counters.refusals == {"model_files": 1}


def test_a_model_that_is_not_on_this_disk_is_served_without_tiers(engine_of):
    engine = engine_of()
    key = ("nobody/has-this-model", None, None)
    assert seen_files(key) is None
    engine.book.loaded(key, None, engine.provider, make_prompt_cache(engine.model))
    engine.key = key
    engine.insert(ids(40))
    assert engine.counters.refusals == {"model_files": 1}


def test_plain_and_quantised_rows_of_one_model_are_two_models(agent, engine_of):
    args = SimpleNamespace(kv_bits=8, kv_group_size=32, quantized_kv_start=64)
    engine = engine_of("quantisable", size=1, args=args)
    wait_for(lambda: len(agent.announced) == 2)
    assert [agent.announced[n]["kv_bits"] for n in (0, 1)] == [0, 8]
    tokens = ids(300)
    quantised = [c.to_quantized(group_size=32, bits=8) for c in engine.computed(tokens)]
    engine.insert(tokens, cache=quantised)
    engine.insert(ids(40, seed=2))
    wait_for(lambda: len(agent.entries) == 2)
    assert [e.model for e in agent.entries] == [1, 0]
    cache, have = engine.fetch([*tokens, 3])
    assert have == 300
    np.testing.assert_array_equal(engine.logits(cache, [3]), engine.logits(engine.kept[tuple(tokens)], [3]))


# --- numbers ------------------------------------------------------------------------------------


def test_the_numbers_say_what_happened(engine_of):
    engine = engine_of(size=2)
    for seed in (1, 2, 3):
        engine.insert(ids(100, seed))
    engine.fetch(ids(102, seed=3))
    engine.fetch(ids(102, seed=1))
    engine.fetch(ids(50, seed=9))
    report = engine.counters.report()
    assert report["entries"] == 2
    assert report["tokens"] == 200
    assert report["size_bytes"] == engine.cache.nbytes
    assert report["evictions"] == 1
    assert report["hits_by_kind"] == {"shorter": 1, "restored": 1, "none": 1}
    assert (report["hits"], report["misses"]) == (2, 1)


def test_prefill_speed_is_measured_where_mlx_lm_stores_the_prompt(engine_of):
    engine = engine_of()
    now = [100.0]
    engine.tiers.clock = lambda: now[0]
    engine.fetch(ids(101))
    now[0] = 102.0
    engine.insert(ids(101)[:100])
    assert engine.counters.prefill_tokens_per_s == 50.0


def test_everything_of_mlx_stays_on_the_calling_thread(engine_of, monkeypatch):
    engine = engine_of(size=1)
    seen = set()
    original = mx.eval

    def spying(*arrays):
        seen.add(threading.current_thread())
        return original(*arrays)

    monkeypatch.setattr(mx, "eval", spying)
    engine.insert(ids(300))
    engine.insert(ids(80, seed=2))
    engine.fetch(ids(303))
    assert seen == {threading.main_thread()}
