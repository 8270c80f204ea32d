"""One rank of a real EXO instance: EXO's own builder, generators and ring, hooked as in an installed environment.

What a runner process does, without the node around it. Steps come in as lines of JSON. Run with the repository,
tests/hooks and tests/state on PYTHONPATH, TIERKV_EXO_SRC, TIERKV_SOCKET and EXO_DEFAULT_MODELS_DIR set; the hook comes
in by its own finder, as with ``tierkv install``.
"""

# ruff: noqa: E402 - EXO is imported when the hook waits for it

import importlib
import json
import os
import sys
import traceback
import uuid

options = json.loads(sys.argv[1])
if options["hook"]:
    os.environ["TIERKV_ALL_RANKS_HOOKED"] = "1"
    from tierkv.hooks import exo_boot

    exo_boot.install()

from exo_engine import PatientClient, exo, without_the_rest

exo.HandoffClient = PatientClient
sys.path.insert(0, os.environ["TIERKV_EXO_SRC"])
without_the_rest()

if options["kv_bits"]:
    # As if EXO's own file said so, before anybody reads it.
    constants = importlib.import_module("exo.worker.engines.mlx.constants")
    constants.KV_CACHE_BITS, constants.CACHE_GROUP_SIZE = options["kv_bits"], 32

from exo.shared.models.model_cards import ModelCard, ModelTask
from exo.shared.types.backends import Backend
from exo.shared.types.common import CommandId, Host, ModelId, NodeId
from exo.shared.types.events import Event
from exo.shared.types.memory import Memory
from exo.shared.types.tasks import TaskId, TextGeneration
from exo.shared.types.text_generation import InputMessage, InputMessageContent, TextGenerationTaskParams
from exo.shared.types.worker.instances import BoundInstance, InstanceId, MlxRingInstance
from exo.shared.types.worker.runners import RunnerId, ShardAssignments
from exo.shared.types.worker.shards import PipelineShardMetadata
from exo.utils.channels import mp_channel
from exo.worker.engines.mlx.builder import MlxBuilder
from exo.worker.runner.bootstrap import logger

logger.remove()
logger.add(sys.stderr, level="INFO")


class Rank:
    """``ports`` of all ranks on loopback, ``layers`` of the whole model; rank r has the r-th half."""

    def __init__(self, rank, ports, model, layers):
        world, step = len(ports), layers // len(ports)
        card = ModelCard(
            model_id=ModelId(model), storage_size=Memory.from_bytes(1), n_layers=layers, hidden_size=32,
            supports_tensor=False, tasks=[ModelTask.TextGeneration], backends=list(Backend),
        )  # fmt: skip
        shards = {
            RunnerId(f"runner-{n}"): PipelineShardMetadata(
                model_card=card, device_rank=n, world_size=world, start_layer=n * step, end_layer=(n + 1) * step,
                n_layers=layers,
            )
            for n in range(world)
        }  # fmt: skip
        nodes = {NodeId(f"node-{n}"): RunnerId(f"runner-{n}") for n in range(world)}
        hosts = [Host(ip="127.0.0.1", port=port) for port in ports]
        instance = MlxRingInstance(
            instance_id=InstanceId("instance"), hosts_by_node=dict.fromkeys(nodes, hosts), ephemeral_port=ports[0],
            shard_assignments=ShardAssignments(
                model_id=ModelId(model), runner_to_shard=shards, node_to_runner=nodes
            ),
        )  # fmt: skip
        bound = BoundInstance(
            instance=instance, bound_runner_id=RunnerId(f"runner-{rank}"), bound_node_id=NodeId(f"node-{rank}")
        )
        self.model = ModelId(model)
        events, self.events = mp_channel[Event]()
        _, cancelled = mp_channel[TaskId]()
        builder = MlxBuilder(model_id=self.model, event_sender=events, cancel_receiver=cancelled)
        if world > 1:
            builder.connect(bound)
        for _ in builder.load(bound):
            pass
        self.engine = builder.build()
        self.prefixes = self.engine.kv_prefix_cache
        self.cache_module = importlib.import_module("exo.worker.engines.mlx.cache")

    @property
    def hook(self):
        from tierkv.hooks import exo_boot

        return exo_boot._hook[-1]

    def do_ask(self, text, number):
        """Request ``number`` (the same on all ranks) until it ends; the text is told by rank 0."""
        task = TextGeneration(
            task_id=TaskId(str(uuid.UUID(int=number))), instance_id=InstanceId("instance"),
            command_id=CommandId(str(uuid.uuid4())),
            task_params=TextGenerationTaskParams(
                model=self.model, input=[InputMessage(role="user", content=InputMessageContent(text))],
                max_output_tokens=8, temperature=0.0,
            ),
        )  # fmt: skip
        self.engine.submit(task)
        said = ""
        for _ in range(10_000):
            ended = False
            for _, part in self.engine.step():
                said += getattr(part, "text", "") or ""
                ended = ended or type(part).__name__ == "FinishedResponse"
            if ended:
                break
        newest = self.prefixes._last_used.index(max(self.prefixes._last_used))
        tokens = len(self.prefixes.prompts[newest])
        tiered = getattr(self.prefixes, "_tierkv", None)
        return {"text": said, "tokens": tokens, "cached": tokens - tiered.asked if tiered is not None else None}

    def do_classes(self):
        """What the newest entry is made of."""
        newest = self.prefixes._last_used.index(max(self.prefixes._last_used))
        return sorted({type(layer).__name__ for layer in self.prefixes.caches[newest]})

    def do_stored(self):
        return self.hook.tiers.mover.drain(60.0, stored=True)

    def do_clear(self):
        self.prefixes.clear()

    def do_ready(self):
        import time

        deadline = time.monotonic() + 60
        tiers = self.hook.tiers
        while time.monotonic() < deadline:
            if tiers.client.wait_available(0.5):
                tiers.client.report_hot({})
                if tiers.model.handle.state not in ("unknown", "hashing"):
                    return True
            time.sleep(0.02)
        return False

    def do_lose_fetches(self):
        def lost(*args, **named):
            raise ConnectionError("lost on the way")

        self.hook.tiers.fetch.fetch = lost

    def do_threshold(self):
        return round(self.cache_module._MEMORY_THRESHOLD, 6)

    def do_snapshots(self):
        return [[each.token_count for each in kept or []] for kept in self.prefixes._snapshots]


rank = Rank(options["rank"], options["ports"], options["model"], options["layers"])
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        said = {"result": getattr(rank, f"do_{name}")(*arguments)}
    except Exception as error:
        traceback.print_exc()
        said = {"result": {"error": f"{type(error).__name__}: {error}"}}
    print(json.dumps(said), flush=True)
os._exit(0)
