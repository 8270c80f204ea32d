"""Whole EXO nodes that make one cluster: each in a network namespace of its own, a cable between the two, no way out.

A node is ``python -m exo``: its router, election, master, worker, HTTP API and spawned runners. What carries messages
between nodes is a stand-in (exo_bindings/exo_rs.py) for EXO's own Rust part.
"""

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
BINDINGS = HERE / "exo_bindings"
BENCH = HERE.parents[1] / "bench"
ADDRESSES = "10.79.0.1", "10.79.0.2"
ROUTER_PORT = 52414
STEP_S = 600
READY_S = 240

# Runs in the first node's namespace: a line of JSON is a call of bench/exo.py's Exo.
CLIENT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from exo import Exo
exo = Exo("http://127.0.0.1:52415", "none")
for line in sys.stdin:
    name, *given = json.loads(line)
    try:
        result = setattr(exo, "model", given[0]) if name == "model" else getattr(exo, name)(*given)
    except (Exception, SystemExit) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)
"""


def missing():
    """Why whole nodes cannot run here; empty if they can."""
    tried = subprocess.run(
        ["unshare", "-rn", "sh", "-c", "ip link set lo up && command -v nsenter"], capture_output=True, text=True
    )  # fmt: skip
    if tried.returncode:
        return f"no network namespaces: {tried.stderr.strip() or 'unshare, ip or nsenter is missing'}"
    modules = "exo.main, exo.worker.engines.mlx.builder"
    tried = subprocess.run([sys.executable, "-c", f"import {modules}"], capture_output=True, text=True, env={
        **os.environ, "PYTHONPATH": os.pathsep.join([str(BINDINGS), os.environ["TIERKV_EXO_SRC"]]),
        "EXO_DASHBOARD_DIR": str(HERE),
    })  # fmt: skip
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else ""


class Namespace:
    """A network namespace that lives as long as a process in it; the first also makes the user namespace."""

    def __init__(self, inside=()):
        self.process = subprocess.Popen(
            [*inside, "unshare", "-n", *(() if inside else ("-r",)), "sh", "-c", "echo here; exec sleep infinity"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline() == "here\n"
        self.inside = ["nsenter", "-t", str(self.process.pid), "-U", "-n", "--preserve-credentials"]

    def run(self, *command):
        subprocess.run([*self.inside, *command], check=True, capture_output=True)

    def end(self):
        self.process.kill()
        self.process.wait(10)


class Nodes:
    """One node for each of ``environments``: what it has beyond the environment of this process.

    ``models``: a folder of models as EXO downloads them. ``cards``: by a model's id, what EXO has to know of it.
    ``command`` starts a node.
    """

    def __init__(self, folder, models, cards, environments, command):
        self.folder = folder
        self.logs = [folder / f"node{n}.log" for n in range(len(environments))]
        self.processes = []
        self.namespaces = [Namespace()]
        self.client = None
        try:
            self._lay_out(cards)
            self._connect(len(environments))
            for number, given in enumerate(environments):
                self._start(number, models, given, command)
            self.client = Client(self.namespaces[0])
            self.wait(self._connected)
        except BaseException:
            self.end()
            raise

    def _lay_out(self, cards):
        for name in ("inference_model_cards", "image_model_cards"):
            (self.folder / "resources" / name).mkdir(parents=True)
        (self.folder / "dashboard").mkdir()
        for name, card in cards.items():
            place = self.folder / "resources" / "inference_model_cards" / f"{name.replace('/', '--')}.toml"
            place.write_text(card_text(name, **card))

    def _connect(self, count):
        first = self.namespaces[0]
        first.run("ip", "link", "set", "lo", "up")
        if count == 1:
            return
        second = Namespace([*first.inside[:-2], "--preserve-credentials"])
        self.namespaces.append(second)
        peer = "peer", "name", "cable", "netns", str(second.process.pid)
        first.run("ip", "link", "add", "cable", "type", "veth", *peer)
        second.run("ip", "link", "set", "lo", "up")
        for each, address in zip(self.namespaces, ADDRESSES, strict=True):
            each.run("ip", "addr", "add", f"{address}/24", "dev", "cable")
            each.run("ip", "link", "set", "cable", "up")

    def _start(self, number, models, given, command):
        home = self.folder / f"exo{number}"
        home.mkdir()
        others = [address for address in ADDRESSES[: len(self.logs)] if address != ADDRESSES[number]]
        environment = {
            **os.environ, "EXO_HOME": str(home), "EXO_DEFAULT_MODELS_DIR": str(models), "HF_HUB_OFFLINE": "1",
            "EXO_RESOURCES_DIR": str(self.folder / "resources"), "EXO_DASHBOARD_DIR": str(self.folder / "dashboard"),
            "EXO_RS_PEERS": ",".join(f"{address}:{ROUTER_PORT}" for address in others), **given,
        }  # fmt: skip
        arguments = ["--offline", *(["--force-master"] if number == 0 else [])]
        with self.logs[number].open("w") as log:
            process = subprocess.Popen(
                [*self.namespaces[number].inside, *command, *arguments], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env=environment, cwd=home,
            )  # fmt: skip
        self.processes.append(process)

    def _connected(self):
        """All nodes are known, can compute, and reach each other."""
        state, count = self._get("/state"), len(self.processes)
        if "error" in state:
            return False
        connections = state["topology"]["connections"]
        edges = {(source, sink) for source, sinks in connections.items() for sink in sinks}
        known = min(len(state["topology"]["nodes"]), len(state["nodeMemory"]), len(state["nodeBackends"]))
        return known == count and len(edges) == count * (count - 1)

    def call(self, *step):
        assert all(each.poll() is None for each in self.processes), self.tail()
        return self.client.call(*step)

    def _get(self, path):
        return self.call("_json", "GET", path)

    def tail(self):
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self.logs)

    def wait(self, what):
        deadline = time.monotonic() + READY_S
        while not what():
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.3)

    def place(self, model, sharding="Pipeline"):
        """One instance over all nodes, ready for requests."""
        self.call("model", model)
        placing = {"model_id": model, "sharding": sharding, "min_nodes": len(self.processes)}
        said = self.call("_json", "POST", "/place_instance", placing)
        assert "error" not in said, (said, self.tail())
        self.wait(self._ready)

    def _ready(self):
        runners = self._get("/state")["runners"]
        ours = [name for each in self.call("instances").values() for name in each["nodeToRunner"].values()]
        return ours and all("RunnerReady" in runners.get(name, {}) for name in ours)

    def remove(self):
        """No instance is left, and no runner of one: what was in their memory is gone."""
        for name in self.call("instances"):
            self.call("_json", "DELETE", f"/instance/{name}")
        self.wait(lambda: not self._get("/state")["instances"] and not any(map(self._runners, self.processes)))

    @staticmethod
    def _runners(process):
        found = []
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found += [each.pid] if "multiprocessing.spawn" in " ".join(each.cmdline()) else []
        return found

    def ask(self, prompt, max_tokens=8):
        """The text, and of how many tokens how many were cached: as EXO's API says it, and as each rank did."""
        said = self.call("ask", prompt, max_tokens)
        assert isinstance(said, list), (said, self.tail())
        _, tokens, cached, text = said
        hits = [re.findall(r"KV cache hit: (\d+)/\d+ tokens", log.read_text()) for log in self.logs]
        return text, tokens, cached, [int(each[-1]) if each else 0 for each in hits]

    def end(self):
        if self.client is not None:
            self.client.end()
        for each in self.processes:
            each.terminate()
        for each in self.processes:
            try:
                each.wait(30)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait(10)
        for each in reversed(self.namespaces):
            each.end()


class Client:
    def __init__(self, namespace):
        self.process = subprocess.Popen(
            [*namespace.inside, sys.executable, "-c", CLIENT, str(BENCH)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.answers = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.answers.put(json.loads(line))

    def call(self, *step):
        self.process.stdin.write(json.dumps(step) + "\n")
        self.process.stdin.flush()
        return self.answers.get(timeout=STEP_S)

    def end(self):
        self.process.kill()
        self.process.wait(10)


def card_text(name, layers, hidden=32, kv_heads=2, base=""):
    return (
        f'model_id = "{name}"\nn_layers = {layers}\nhidden_size = {hidden}\nnum_key_value_heads = {kv_heads}\n'
        f'supports_tensor = true\ntasks = ["TextGeneration"]\nbase_model = "{base}"\nbackends = ["MlxCpu"]\n'
        "[storage_size]\nin_bytes = 1000000\n"
    )
