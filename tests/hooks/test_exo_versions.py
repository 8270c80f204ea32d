"""Every build of EXO's prefix cache since February 2026: hooked as it is, or left alone with one line.

On the stand-in always; on EXO itself for every checkout in the folder that TIERKV_EXO_VERSIONS names, one a version.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from exo_engine import Rig, module_named
from fake_agent import FakeAgent

from tierkv.hooks import exo

HERE = Path(__file__).resolve().parent
VERSIONS = os.environ.get("TIERKV_EXO_VERSIONS", "")
CHECKOUTS = sorted(each for each in Path(VERSIONS).iterdir() if (each / "src").is_dir()) if VERSIONS else []
# Class of the stand-in: lists that entries have a slot in, and the length of an answer.
BUILDS = {
    "FirstKVPrefixCache": (4, 3),
    "OldKVPrefixCache": (4, 3),
    "MediaKVPrefixCache": (5, 3),
    "KVPrefixCache": (6, 4),
    "NamedKVPrefixCache": (6, 4),
}


@pytest.fixture
def build(monkeypatch):
    """Makes the stand-in look like another version."""

    def named(name):
        def module():
            made = module_named("stand-in")
            made.KVPrefixCache = getattr(made, name)
            return made

        monkeypatch.setattr("exo_engine.module_named", lambda which: module())
        return module

    return named


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("name", BUILDS)
def test_a_build_of_the_prefix_cache_is_hooked_as_it_is(build, agent, tmp_path, name, kind):
    build(name)
    lists, answers = BUILDS[name]
    rig = Rig("stand-in", kind, agent.path, tmp_path / "model", connect=False)
    assert rig.tiers.client.wait_available(10)
    assert len(rig.hook.shape.lists) == lists
    tokens = np.random.default_rng(1).integers(0, 97, 300).tolist()
    assert rig.serve(tokens).cached == 0
    assert rig.tiers.mover.drain(10, stored=True)
    rig.prefixes.clear()
    assert rig.serve(tokens).cached == 298
    assert {len(getattr(rig.prefixes, each)) for each in rig.hook.shape.lists} == {1}
    assert len(rig.prefixes.get_kv_cache(rig.model, mx.array(tokens))) == answers
    rig.close()


def test_what_exo_computes_from_state_that_it_does_not_have_is_not_stored(build, agent, tmp_path):
    build("OldKVPrefixCache")
    rig = Rig("stand-in", "llama", agent.path, tmp_path / "model", connect=False)
    assert rig.tiers.client.wait_available(10)
    longer = np.random.default_rng(1).integers(0, 97, 460).tolist()
    rig.serve(longer[:300])
    assert rig.tiers.mover.drain(10, stored=True)
    # The vault's copy is right, EXO's own use of its entry is not: it goes on at 300 from a state at 298.
    agent.restore_reason = "down"
    assert rig.serve(longer[:400]).cached == 300
    assert rig.serve(longer).cached == 400
    assert rig.tiers.mover.drain(10, stored=True)
    assert rig.tiers.counters.refusals == {"wrong_state": 2}
    assert len(agent.entries) == 1
    agent.restore_reason = ""
    assert rig.serve(longer).cached == 298
    assert rig.tiers.mover.drain(10, stored=True)
    assert [entry.position for entry in agent.entries] == [298, 458]
    rig.close()


@pytest.fixture
def agent(tmp_path):
    running = FakeAgent(tmp_path / "agent.sock").start()
    yield running
    running.stop()


def before_february(module):
    """As EXO 1.0.67: prompts as text, no snapshots, a tokenizer where the group is now."""
    for name in ("snapshot_ssm_states", "has_non_kv_caches", "get_memory_used_percentage"):
        delattr(module, name)


def a_tree(module):
    class Tree(module.KVPrefixCache):
        def __init__(self, group):
            super().__init__(group)
            self._by_prefix = {}

    module.KVPrefixCache = Tree


def another_first_argument(module):
    class Named(module.KVPrefixCache):
        def __init__(self, group, slots):
            super().__init__(group)

    module.KVPrefixCache = Named


@pytest.mark.parametrize("change", [before_february, a_tree, another_first_argument])
def test_a_build_that_keeps_entries_in_another_way_is_left_alone(change, capfd, monkeypatch):
    monkeypatch.delitem(sys.modules, exo.BOOTSTRAP, raising=False)
    module = module_named("stand-in")
    change(module)
    before = dict(vars(module.KVPrefixCache))
    assert exo.hook_cache(module) is None
    assert dict(vars(module.KVPrefixCache)) == before
    assert len(capfd.readouterr().err.strip().splitlines()) == 1


@pytest.mark.skipif(not CHECKOUTS, reason="TIERKV_EXO_VERSIONS names no checkouts of EXO")
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda each: each.name)
def test_a_real_version_of_exo(checkout, agent, tmp_path):
    source = (checkout / "src" / "exo" / "worker" / "engines" / "mlx" / "cache.py").read_text()
    done = subprocess.run(
        [sys.executable, str(HERE / "exo_version.py"), str(agent.path), str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
        env={
            **os.environ, "TIERKV_EXO_SRC": str(checkout / "src"),
            "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent / "state", HERE.parents[1]))),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    if "unusable" in said:
        pytest.skip(f"this version needs another mlx-lm: {said['unusable']}")
    known = "class CacheSnapshot" in source
    assert (not said["refused"], not said["faults"]) == (known, known), said
    if not known:
        assert said["untouched"]
        assert "EXO runs without tiers" in done.stderr
        return
    for kind, seen in said["models"].items():
        assert seen["cached"] == [0, 398, 398], kind
        assert all(seen["right"]), kind
        # Until 22 April 2026 EXO itself went on from two tokens that its entry did not have.
        for own, is_same in zip(seen["own"], seen["same"], strict=True):
            assert is_same or own > 398, kind
        assert set(seen["slots"].values()) == {1}
        assert seen["answers"] == (4 if "prefill_tps" in source else 3)
