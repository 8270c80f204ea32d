"""Two ranks in two processes over mlx's ring on loopback: they restore the same position or none, and never hang."""

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from exo_engine import GIB, SOURCE

from tierkv.demo.processes import free_port

HERE = Path(__file__).resolve().parent
PATHS = HERE, HERE.parent / "state", HERE.parents[1]
# Longer than a loaded machine takes to start EXO, far shorter than for ever.
STEP_S = 240
seeds = itertools.count(5000, 2)
A, B = [[300, 0]], [[200, 9]]
LONGER = [[300, 0], [100, 1]]


class Process:
    def __init__(self, options, script="exo_rank.py", environment=None):
        self.log = Path(options["folder"]).parent / f"rank{options['rank']}.log"
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script), json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS)), **(environment or {})},
        )  # fmt: skip
        self.answers = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                self.answers.put(json.loads(line))
        self.answers.put({"ended": True})

    def tell(self, *step):
        self.process.stdin.write(json.dumps(step) + "\n")
        self.process.stdin.flush()

    def answer(self):
        try:
            said = self.answers.get(timeout=STEP_S)
        except queue.Empty:
            raise AssertionError(f"a rank hangs:\n{self.log.read_text()[-2000:]}") from None
        assert "ended" not in said, self.log.read_text()[-3000:]
        return said.get("result")

    def end(self):
        self.process.kill()
        self.process.wait(10)


class Pair:
    """Two processes in one ring; ``both`` gives both the same step and waits for both."""

    def __init__(self, folder):
        hostfile = folder / "hosts.json"
        hostfile.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]))
        named = {"hostfile": str(hostfile), "folder": str(folder / "ranks")}
        self.ranks = [Process({"rank": rank, **named}) for rank in range(2)]
        for rank in self.ranks:
            rank.answer()

    def start(self, sockets, folder, **options):
        """Another instance of a model that nobody has seen."""
        seed = next(seeds)
        for number, rank in enumerate(self.ranks):
            rank.tell("start", {
                "socket": str(sockets[number]), "seed": seed + number, "folder": str(folder / f"shard{number}"),
                "module": "stand-in", "model": "llama", "hooked": True, "connect": True, **options,
            })  # fmt: skip
        for rank in self.ranks:
            rank.answer()

    def both(self, *step):
        for rank in self.ranks:
            rank.tell(*step)
        return [rank.answer() for rank in self.ranks]

    def one(self, rank, *step):
        self.ranks[rank].tell(*step)
        return self.ranks[rank].answer()

    def cached(self, prompt):
        return [said["cached"] for said in self.both("serve", prompt)]

    def end(self):
        for rank in self.ranks:
            rank.end()


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    running = Pair(tmp_path_factory.mktemp("ring"))
    yield running
    running.end()


@pytest.fixture
def pair(ring, clusters, tmp_path):
    def make(sockets=None, **options):
        ring.start(sockets or [cluster.socket for cluster in clusters], tmp_path, **options)
        return ring

    return make


REAL = pytest.param("real", "qwen3_next", marks=pytest.mark.skipif(not SOURCE, reason="TIERKV_EXO_SRC is not set"))


@pytest.mark.parametrize(("module", "model"), [("stand-in", "llama"), ("stand-in", "qwen3_next"), REAL])
def test_both_restore_the_same_or_the_shorter_or_nothing(pair, module, model):
    ranks = pair(module=module, model=model)
    cold = ranks.both("serve", A)
    assert [said["cached"] for said in cold] == [0, 0]
    ranks.both("stored")
    ranks.both("clear")
    restored = ranks.both("serve", A)
    assert [said["cached"] for said in restored] == [298, 298]
    assert [said["top"] for said in restored] == [said["top"] for said in cold]
    # Rank 1 keeps the longer prompt to itself: both go back to what both have.
    ranks.one(1, "setting", "demote", "on-evict")
    ranks.both("clear")
    assert ranks.cached(LONGER) == [298, 298]
    ranks.one(0, "stored")
    ranks.both("clear")
    assert ranks.cached(LONGER) == [298, 298]
    # What rank 1 was promised does not come: nobody uses it, nobody waits.
    ranks.one(1, "lose_fetches")
    ranks.both("clear")
    assert ranks.cached(A) == [0, 0]
    assert ranks.cached(A) == [298, 298]


def test_a_rank_without_an_agent_makes_both_compute(pair, clusters, tmp_path):
    ranks = pair([clusters[0].socket, tmp_path / "nobody.sock"], connect=False)
    ranks.one(0, "ready")
    assert ranks.cached(A) == [0, 0]
    ranks.one(0, "stored")
    ranks.both("clear")
    assert ranks.cached(A) == [0, 0]


def test_ranks_that_are_not_known_to_be_hooked_only_store(pair):
    ranks = pair(hooked=False)
    assert ranks.cached(A) == [0, 0]
    ranks.both("stored")
    ranks.both("clear")
    # No gather: a rank may look alone.
    assert ranks.one(0, "serve", B)["cached"] == 0
    assert ranks.one(1, "serve", B)["cached"] == 0
    assert ranks.cached(A) == [0, 0]


def test_the_prefill_server_of_rank_0_does_not_wait_for_the_others(pair):
    ranks = pair()
    assert ranks.cached(A) == [0, 0]
    ranks.both("stored")
    ranks.both("clear")
    assert ranks.one(0, "outside", A) == 0
    assert ranks.cached(A) == [298, 298]


def test_thresholds_change_on_all_ranks_at_once_and_all_evict_the_same(pair):
    ranks = pair()
    own = ranks.both("threshold")
    ranks.one(1, "setting", "memory_threshold", 0.5)
    for seed in range(3):
        ranks.cached([[200, seed]])
    assert ranks.both("threshold") == [0.5, 0.5] != own
    sizes = ranks.both("sizes")
    # Only rank 1's memory is over the mark, by a little more than one entry.
    ranks.one(1, "memory", 50 * GIB + sizes[1][0] + 1)
    assert ranks.both("evict") == [[200], [200]]
