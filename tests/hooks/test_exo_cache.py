"""EXO's prefix cache with the hook, a real agent and real vaults behind it: the stand-in, and EXO itself if there."""

import mlx.core as mx
import numpy as np
import pytest
from exo_engine import GIB, Memory, Region, Rig, alone, assert_reuses_as_exo, same

KINDS = ["llama", "gemma3_text", "qwen3_next"]


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 97, n).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_an_evicted_prompt_comes_back_as_exos_own(rig, which, kind):
    ours = rig(kind)
    own = alone(which, ours.model)
    tokens = prompt(400)
    cold, hot = own(tokens), own(tokens)
    assert (cold.cached, hot.cached) == (0, 398)
    assert same(ours.serve(tokens), cold)
    ours.forget()
    restored = ours.serve(tokens)
    assert (restored.cached, restored.exact) == (398, True)
    assert same(restored, hot)
    assert ours.tiers.counters.hits == {"none": 1, "restored": 1}
    assert ours.serve(tokens).cached == 398
    assert ours.tiers.counters.hits["exact"] == 1


CASES = {
    "longer": (prompt(400), [*prompt(400), *prompt(100, 1)]),
    "shorter": (prompt(400), prompt(300)),
    "diverging": (prompt(400), [*prompt(280), *prompt(150, 2)]),
    "shared system prompt": ([*prompt(260), *prompt(120, 3)], [*prompt(260), *prompt(200, 4)]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_other_prompts_reuse_what_exo_itself_would(rig, which, kind, case):
    ours = rig(kind)
    own = alone(which, ours.model)
    first, second = CASES[case]
    assert_reuses_as_exo(ours, own, first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_is_restored_turn_after_turn(rig, which, kind):
    ours = rig(kind)
    turns = [prompt(300), [*prompt(300), *prompt(90, 1)], [*prompt(300), *prompt(90, 1), *prompt(120, 2)]]
    for before, turn in zip([[], *turns], turns, strict=False):
        served = ours.serve(turn)
        # The first two tokens that decoding starts from are not in the entry's state.
        assert served.cached == max(0, len(before) - 2)
        ours.forget()


def test_a_local_entry_without_a_usable_snapshot_does_not_hide_the_restored_one(rig):
    ours = rig("qwen3_next")
    tokens = prompt(400)
    ours.serve(tokens)
    ours.stored()
    for snapshots in ours.prefixes._snapshots:
        del snapshots[1:]
    assert ours.serve(tokens).cached == 398


def test_what_is_here_is_not_fetched(rig):
    ours = rig()
    tokens = prompt(400)
    ours.serve(tokens)
    ours.stored()
    assert ours.serve(tokens[:300]).cached == 299
    assert ours.tiers.counters.restored_tokens == 0


def test_images_are_part_of_the_prefix(rig):
    ours = rig()
    tokens = prompt(400)
    cat, dog = [[Region(name * 32, 100, 200)] for name in ("ca", "d0")]
    ours.serve(tokens, cat)
    ours.forget()
    assert ours.serve(tokens, dog).cached <= 100
    ours.forget()
    restored = ours.serve(tokens, cat)
    assert restored.cached == 398
    assert ours.prefixes._media_regions[restored.index] == cat
    ours.forget()
    # The prompt ends inside the image: rows there depend on what follows.
    assert ours.serve(tokens[:150], [Region("ca" * 32, 100, 200)]).cached <= 100


def test_a_checkpoint_inside_an_image_is_not_stored(rig):
    ours = rig("qwen3_next")
    tokens = prompt(400)
    ours.serve(tokens, [Region("ca" * 32, 100, 300)])
    ours.forget()
    # Snapshots stand at 128, 256, 384 and 398.
    assert ours.serve([*tokens[:390], *prompt(60, 5)], [Region("ca" * 32, 100, 300)]).cached == 384
    ours.forget()
    assert ours.serve([*tokens[:350], *prompt(60, 6)], [Region("ca" * 32, 100, 300)]).cached == 0


def test_an_update_that_overwrites_a_branch_loses_nothing(rig):
    ours = rig()
    first, second = [*prompt(300), *prompt(150, 1)], [*prompt(300), *prompt(150, 2)]
    ours.serve(first)
    ours.serve(second)
    assert len(ours.prefixes.prompts) == 1
    assert ours.tiers.counters.evictions == 1
    ours.stored()
    assert ours.serve(first).cached == 448


def test_on_evict_hands_over_what_is_overwritten_or_dropped(rig):
    memory = Memory()
    ours = rig(memory=memory)
    ours.tiers.client.forced["demote"] = "on-evict"
    first, second = [*prompt(300), *prompt(150, 1)], [*prompt(300), *prompt(150, 2)]
    ours.serve(first)
    assert ours.tiers.counters.offered == 0
    ours.serve(second)
    assert ours.tiers.counters.offered == 1
    memory.used = 60 * GIB + 1
    ours.serve(prompt(200, 7))
    assert [len(each) for each in ours.prefixes.prompts] == [200]
    ours.forget()
    memory.used = 0
    for tokens in (first, second):
        assert ours.serve(tokens).cached == 448
        ours.prefixes.clear()


def test_what_could_not_be_handed_over_is_offered_again_with_the_next_prompt(rig):
    ours = rig()
    offer, ours.tiers.client.offer = ours.tiers.client.offer, lambda *args, **named: None
    first = prompt(300)
    ours.serve(first)
    assert ours.tiers.counters.refusals == {"no_agent": 1}
    ours.tiers.client.offer = offer
    ours.serve(prompt(200, 5))
    assert ours.tiers.counters.offered == 2
    ours.forget()
    assert ours.serve(first).cached == 298


def test_one_entry_over_the_mark_costs_one_entry_and_memory_falls(rig):
    memory = Memory()
    ours = rig(memory=memory)
    for seed in range(5):
        ours.serve(prompt(600, seed), step=600, decode=1)
    ours.stored()
    mx.clear_cache()
    before = mx.get_active_memory() + mx.get_cache_memory()
    held = ours.prefixes._tierkv.sizes()
    memory.used = 60 * GIB + 1000
    ours.prefixes._evict_if_needed()
    assert len(ours.prefixes.caches) == 4
    assert before - (mx.get_active_memory() + mx.get_cache_memory()) >= 0.9 * held[0]
    assert ours.tiers.counters.evictions == 1
    assert ours.tiers.counters.evicted_bytes == held[0]
    # The system does not show it as free yet: that is no reason to drop another one.
    ours.prefixes._evict_if_needed()
    assert len(ours.prefixes.caches) == 4


def test_the_newest_entry_stays_and_a_mark_below_the_model_is_said_to_be_unreachable(rig):
    memory = Memory()
    ours = rig(memory=memory)
    for seed in range(3):
        ours.serve(prompt(400, seed))
    total, newest = sum(ours.prefixes._tierkv.sizes()), ours.prefixes.caches[-1]
    memory.used = 80 * GIB
    ours.prefixes._evict_if_needed()
    assert len(ours.prefixes.caches) == 3
    assert "threshold unreachable: 80" in ours.tiers.counters.note
    memory.used = 60 * GIB + total - ours.prefixes._tierkv.sizes()[-1]
    ours.prefixes._evict_if_needed()
    assert ours.prefixes.caches == [newest]
    assert ours.tiers.counters.note == ""


def test_without_an_agent_exo_is_as_it_was(which, tmp_path):
    ours = Rig(which, "llama", tmp_path / "nobody.sock", tmp_path / "model", memory=Memory(99 * GIB), connect=False)
    own = alone(which, ours.model)
    before = ours.module._MEMORY_THRESHOLD
    asked = []
    for tokens in (prompt(300), [*prompt(300), *prompt(50, 1)], prompt(200), prompt(120, 5), prompt(300)):
        hooked, plain = ours.serve(tokens), own(tokens)
        asked.append((hooked.cached, hooked.exact, hooked.index))
        assert asked[-1] == (plain.cached, plain.exact, plain.index)
        assert same(hooked, plain)
    assert before == ours.module._MEMORY_THRESHOLD
    ours.close()


def test_a_new_runner_finds_what_the_old_one_stored(rig):
    ours = rig("qwen3_next")
    tokens = prompt(400)
    cold = ours.serve(tokens)
    ours.stored()
    ours.restart()
    served = ours.serve(tokens)
    assert served.cached == 398
    assert mx.allclose(served.logits[0], cold.logits[0], atol=1e-4)


class Explosive:
    """A client of which everything fails."""

    def __getattr__(self, name):
        raise RuntimeError(f"no {name} today")


def test_nothing_of_the_hook_reaches_exo(rig, which):
    ours = rig()
    own = alone(which, ours.model)
    ours.tiers.client = ours.tiers.fetch._client = ours.tiers.hand_over._client = Explosive()
    for tokens in (prompt(300), prompt(250), prompt(300)):
        hooked, plain = ours.serve(tokens), own(tokens)
        assert (hooked.cached, hooked.index) == (plain.cached, plain.index)
        assert same(hooked, plain)
    ours.tiers.client = ours.client()


def test_the_hook_comes_off_again(rig, which):
    ours = rig()
    before = {name: getattr(alone_class(which), name) for name in ("add_kv_cache", "get_kv_cache", "__init__")}
    hooked = ours.module.KVPrefixCache
    assert all(getattr(hooked, name).__wrapped__ for name in before)
    ours.hook.remove()
    assert not any(hasattr(getattr(hooked, name), "__wrapped__") for name in before)
    assert not hasattr(ours.module.get_memory_used_percentage, "__wrapped__")


def alone_class(which):
    from exo_engine import module_named

    return module_named(which).KVPrefixCache
