"""How long a restore takes, stage by stage: agent and vaults in processes of their own, synthetic state.

    python bench/restore.py [--model smollm2|hybrid] [--tokens 1024] [--codec int8] [--repeat 7] [--json]

Stages, as medians over the repeats: ``probe`` (first byte of an answer: lookup in the vaults and the choice), ``fetch``
(records from the vaults until the last piece is announced, decoding included), ``copy`` (out of shared memory into the
engine's own arrays) and ``total`` (what the engine's thread waits). ``..._cpu`` is processor time a restore, which says
more than wall time on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
import psutil
from _agents import start
from _scratch import scratch_folder

from tierkv.handoff import client as client_module
from tierkv.handoff.client import HandoffClient, ModelAnnouncement, Restored, model_files
from tierkv.handoff.mover import Mover
from tierkv.handoff.restored import Assembly
from tierkv.handoff.transfer import Transfer
from tierkv.state.fidelity import to_bfloat16
from tierkv.state.layout import ArraySpec, LayerLayout, Layout


def smollm2_layout(dtype: str = "float32") -> Layout:
    """SmolLM2-135M: 30 layers, 3 KV heads of 64."""
    arrays = tuple(ArraySpec(name, dtype, (1, 3, -1, 64)) for name in ("keys", "values"))
    return Layout(tuple(LayerLayout("rows", "KVCache", arrays) for _ in range(30)))


def hybrid_layout() -> Layout:
    """8 layers of qwen3_next, full attention every fourth: 2 KV heads of 64, recurrent state of about 0.9 MB."""
    rows = tuple(ArraySpec(name, "float32", (1, 2, -1, 64)) for name in ("keys", "values"))
    state = (ArraySpec("0", "float32", (1, 3, 1024)), ArraySpec("1", "float32", (1, 8, 64, 64)))
    return Layout(
        tuple(
            LayerLayout("rows", "KVCache", rows) if layer % 4 == 3 else LayerLayout("state", "ArraysCache", state)
            for layer in range(8)
        )
    )


LAYOUTS = {"smollm2": smollm2_layout, "hybrid": hybrid_layout}


def make_state(layout: Layout, n: int) -> dict[tuple[int, int], np.ndarray]:
    """Normally distributed, float32 or as the bits of bfloat16."""
    rng = np.random.default_rng(0)
    state = {}
    for layer, each in enumerate(layout.layers):
        for number, spec in enumerate(each.arrays):
            values = rng.standard_normal([n if axis == -1 else axis for axis in spec.shape], np.float32)
            state[layer, number] = to_bfloat16(values) if spec.dtype == "bfloat16" else values
    return state


class Stages:
    """Looks at a client's restores from inside: when the plan came, and how long copying took."""

    def __init__(self) -> None:
        self.planned_s = 0.0
        self.copied_s = 0.0
        stages = self

        class Timed(Assembly):
            def __init__(self, plan) -> None:
                stages.planned_s, stages.copied_s = time.perf_counter(), 0.0
                super().__init__(plan)

            def add(self, piece, region) -> None:
                began = time.perf_counter()
                super().add(piece, region)
                stages.copied_s += time.perf_counter() - began

        client_module.Assembly = Timed


def measure(model: str, n_tokens: int, codec: str, repeat: int, home: Path) -> dict[str, object]:
    layout = LAYOUTS[model]()
    vault = {"max_bytes": 1 << 30, "max_record_bytes": 256 << 20}
    processes = []
    try:
        kv, kv_port = start("vault", home, name="kv", role="kv-vault", **vault)
        ssm, ssm_port = start("vault", home, name="ssm", role="ssm-vault", **vault)
        agent, _ = start(
            "inference", home, name="agent", socket=str(home / "bench.sock"), kv_codec=codec,
            kv_cold=[f"127.0.0.1:{kv_port}"], ssm_cold=[f"127.0.0.1:{ssm_port}"], break_even=False,
        )  # fmt: skip
        processes = [kv, ssm, agent]
        return restores(model, layout, n_tokens, repeat, home, {"agent": agent.pid, "vaults": kv.pid, "ssm": ssm.pid})
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(10)


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


class BenchEngine:
    """An engine's side of the hand-off, with made-up weights and state."""

    def __init__(self, home: Path, model: str, layout: Layout, n_tokens: int) -> None:
        (home / "model.safetensors").write_bytes(os.urandom(1000))
        self.layout, self.n_tokens = layout, n_tokens
        self.client = HandoffClient(home / "bench.sock", "bench", "bench 1", connect_budget_s=5.0)
        self.mover = Mover(self.client)
        self.handle = self.client.announce(ModelAnnouncement(model, model_files(home), "{}"))
        while self.handle.state != "ready":
            self.client.report_hot({})
            time.sleep(0.05)
        self.tokens = np.random.default_rng(1).integers(0, 30000, n_tokens + 1)

    def store(self, state: dict[tuple[int, int], np.ndarray]) -> dict[str, float]:
        """``state`` is in the vaults; how long the offer, handing it over and storing it took."""
        began = time.perf_counter()
        offer = self.client.offer(self.handle, self.tokens, self.n_tokens, self.layout, budget_s=1.0)
        offered_s = time.perf_counter() - began
        assert offer is not None
        rows = {key: array for key, array in state.items() if self.layout.layers[key[0]].kind == "rows"}
        checkpoint = {key: array for key, array in state.items() if key not in rows}
        began = time.perf_counter()
        self.mover.submit(Transfer(offer, self.layout, rows, checkpoint, {}))
        assert self.mover.drain(60.0)
        handed_over_s = time.perf_counter() - began
        assert self.mover.drain(60.0, stored=True)
        return {"offer_s": offered_s, "hand_over_s": handed_over_s, "stored_s": time.perf_counter() - began}

    def restore(self) -> Restored:
        got = self.client.restore(self.handle, self.tokens, limit=self.n_tokens, expected=self.layout.signature())
        assert isinstance(got, Restored), got
        return got

    def close(self) -> None:
        self.mover.close()
        self.client.close()


def restores(
    model: str, layout: Layout, n_tokens: int, repeat: int, home: Path, pids: dict[str, int]
) -> dict[str, object]:
    engine = BenchEngine(home, model, layout, n_tokens)
    state = make_state(layout, n_tokens)
    storing = engine.store(state)
    stages = Stages()
    runs: list[dict[str, float]] = []
    pids = {"client": os.getpid(), **pids}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    for _ in range(repeat):
        began = time.perf_counter()
        got = engine.restore()
        total_s = time.perf_counter() - began
        probe_s = stages.planned_s - began
        runs.append(
            {
                "total_s": total_s,
                "probe_s": probe_s,
                "fetch_s": total_s - probe_s - stages.copied_s,
                "copy_s": stages.copied_s,
            }
        )
    cpu = {name: (cpu_s(pid) - before[name]) / repeat for name, pid in pids.items()}
    cpu["vaults"] += cpu.pop("ssm")
    engine.close()
    raw = sum(array.nbytes for array in state.values())
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {
        "model": model, "tokens": n_tokens, "codec": got.codec, "raw_bytes": raw, "moved_bytes": got.bytes_moved,
        **storing, **medians, "best_total_s": min(run["total_s"] for run in runs),
        **{f"{name}_cpu_s": seconds for name, seconds in cpu.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*LAYOUTS, "all"], default="all")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for model in LAYOUTS if arguments.model == "all" else [arguments.model]:
        with scratch_folder() as home:
            results.append(measure(model, arguments.tokens, arguments.codec, arguments.repeat, home))
    if arguments.json:
        print(json.dumps({"schema": "tierkv.bench-restore/1", "runs": results}))
        return
    for run in results:
        print(f"{run['model']}, {run['tokens']} tokens, {run['codec']}: {run['raw_bytes'] / 1e6:.1f} MB of state, "
              f"{run['moved_bytes'] / 1e6:.1f} MB moved")  # fmt: skip
        for name in (each for each in run if each.endswith("_s")):
            print(f"  {name[:-2]:12} {run[name] * 1e3:8.1f} ms")


if __name__ == "__main__":
    main()
