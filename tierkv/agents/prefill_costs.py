"""What computing costs with each model on this machine, kept across restarts of engines and of the agent.

The first request of an engine that was restarted is often one for what it computed before, and a restore may take what
computing takes: that must be known then.

One small file for all inference agents of a user: ``{"schema": "tierkv.prefill-costs/1", "models": {digest: [[start,
end, seconds], ...]}}``. Digests and numbers only; without it the next prefills tell the same again, so nothing here
ever fails.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from blake3 import blake3

from tierkv.agents.break_even import PrefillCost, PrefillSample, prefill_sample
from tierkv.handoff.protocol import FileSeen, ModelAnnouncement
from tierkv.identity.kept import keep_json

_log = logging.getLogger(__name__)

SCHEMA = "tierkv.prefill-costs/1"
MAX_MODELS = 64
# Few, so that what an engine measures now soon counts for more.
REMEMBERED_SAMPLES = 16
_MAX_FILE_BYTES = 1 << 20

Samples = list[PrefillSample]


class PrefillCosts:
    """``path``: the file; None keeps nothing. Owned by the event loop."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._costs: dict[str, PrefillCost] = {}
        self._kept: dict[str, Samples] = self._load()

    def of(self, said: ModelAnnouncement, engine: str, build: str) -> PrefillCost:
        """The cost of this model with this engine, one for all forms of its cache, with what is remembered of it."""
        name = _name(said, engine, build)
        cost = self._costs.pop(name, None) or PrefillCost(self._kept.get(name, ()))
        self._costs[name] = cost
        while len(self._costs) > MAX_MODELS:
            del self._costs[next(iter(self._costs))]
        return cost

    def keep(self) -> None:
        """The file tells what is known now; what it says of other models stays, up to 64 of them."""
        known = {name: cost.samples[-REMEMBERED_SAMPLES:] for name, cost in self._costs.items()}
        known = {name: samples for name, samples in known.items() if samples and self._kept.get(name) != samples}
        if self._path is None or not known:
            return
        others = {name: samples for name, samples in self._load().items() if name not in known}
        self._kept = dict(list({**others, **known}.items())[-MAX_MODELS:])
        try:
            keep_json(self._path, {"schema": SCHEMA, "models": self._kept})
        except OSError as error:
            _log.warning("%s cannot be written, a restart forgets what computing costs: %s", self._path, error)

    def _load(self) -> dict[str, Samples]:
        """What the file says, as far as it can be true."""
        if self._path is None:
            return {}
        try:
            with self._path.open("rb") as file:
                document: object = json.loads(file.read(_MAX_FILE_BYTES))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("%s cannot be read and counts for nothing: %s", self._path, error)
            return {}
        if not isinstance(document, dict) or cast("dict[str, object]", document).get("schema") != SCHEMA:
            _log.warning("%s is not a list of prefill costs and counts for nothing", self._path)
            return {}
        models = cast("dict[str, object]", document).get("models")
        if not isinstance(models, Mapping):
            return {}
        found = ((name, _samples(rows)) for name, rows in cast("Mapping[str, object]", models).items())
        return dict([(name, samples) for name, samples in found if samples][-MAX_MODELS:])


def _samples(rows: object) -> Samples:
    listed = cast("list[object]", rows)[:REMEMBERED_SAMPLES] if isinstance(rows, list) else []
    return [sample for row in listed if (sample := prefill_sample(row)) is not None]


def _name(said: ModelAnnouncement, engine: str, build: str) -> str:
    """The same for all forms of one model's cache; nothing of it has to be read or hashed first."""
    shard = (said.shard_kind, said.shard_rank, said.shard_world, said.layer_start, said.layer_end)
    sizes = [_bytes(files) for files in (said.weights, said.adapter, said.draft)]
    parts = json.dumps([engine, build, said.name, said.config, sizes, shard])
    return blake3(parts.encode()).hexdigest()[:32]


def _bytes(files: tuple[FileSeen, ...]) -> int:
    return sum(file.size_bytes for file in files)
