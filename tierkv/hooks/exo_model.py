"""Which model an EXO runner has loaded, and which part of it: a runner has one, for as long as it lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from importlib import metadata
from inspect import isgenerator
from pathlib import Path
from typing import Any

from tierkv.errors import TierKVError, UnsupportedState
from tierkv.handoff.client import FileSeen, HandoffClient, ModelAnnouncement, ModelHandle, model_files
from tierkv.hooks.mlx_models import LoadedModel
from tierkv.state import mlx_cache

Files = tuple[FileSeen, ...]
SHARD_KINDS = {"PipelineShardMetadata": "pipeline", "TensorShardMetadata": "tensor"}
QUANTISED = "QuantizedKVCache"
# Bits and group size of rows that are kept quantised; None for plain rows.
Rows = tuple[int, int] | None


class RunnerModel:
    """The model of this runner as the agent knows it.

    With EXO's KV_CACHE_BITS rows are kept quantised. What is stored for the same tokens then differs, so each such form
    is announced as a model of its own. ``handle`` names the one that was used last.
    """

    def __init__(self, client: HandoffClient, module: Any) -> None:
        """``module``: EXO's cache module."""
        self._client = client
        self._module = module
        self._said: ModelAnnouncement | None = None
        self._forms: dict[Rows, ModelHandle] = {}
        self._loaded: LoadedModel | None = None
        self._model: weakref.ref[Any] | None = None
        self.handle: ModelHandle | None = None

    def loaded(self, said: ModelAnnouncement) -> None:
        """Nothing is known of a model that was loaded before. The form that EXO's settings ask for is announced."""
        self._said, self._loaded = said, None
        self._forms.clear()
        bits, group = (getattr(self._module, name, None) for name in ("KV_CACHE_BITS", "CACHE_GROUP_SIZE"))
        self._named((int(bits), int(group)) if bits and group else None)

    def of_cache(self, cache: Sequence[Any]) -> ModelHandle:
        """What names this live cache to the agent. Raises UnsupportedState for a class that is not carried."""
        return self._named(_rows_of(mlx_cache.expected_signature(cache)))

    def of_model(self, model: Any) -> LoadedModel:
        """What caches of EXO's ``model`` look like. Raises UnsupportedState likewise."""
        self._model = weakref.ref(model)
        if self._loaded is None:
            signature = mlx_cache.expected_signature(self._module.make_kv_cache(model))
            self._loaded = LoadedModel(self._named(_rows_of(signature)), signature)
        return self._loaded

    def served(self, handle: ModelHandle) -> Any:
        """The model that EXO last asked for a cache of, where ``handle`` names its caches; None otherwise."""
        return self._model() if self._model is not None and handle is self.handle else None

    def _named(self, rows: Rows) -> ModelHandle:
        if self._said is None:
            raise UnsupportedState("model_unknown", "EXO has not said which model it loaded")
        if rows not in self._forms:
            bits, group = rows or (0, 0)
            self._forms[rows] = self._client.announce(replace(self._said, kv_bits=bits, kv_group_size=group))
        self.handle = self._forms[rows]
        return self.handle


def _rows_of(signature: mlx_cache.Signature) -> Rows:
    for _, name, _, params in signature:
        if name == QUANTISED:
            said = dict(params)
            return said["bits"], said["group_size"]
    return None


def engine_build() -> str:
    """Versions that decide how state is computed, for the model's identity."""
    return " ".join(f"{name} {_version(name)}" for name in ("exo", "mlx-lm", "mlx"))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def announcement(shard: Any, folder: Path, weights: Files) -> ModelAnnouncement:
    """The model and the shard of it. A model that is not split is the same on whichever node it runs."""
    name = str(shard.model_card.model_id)
    config = (folder / "config.json").read_text(encoding="utf-8")
    if int(shard.world_size) == 1:
        return ModelAnnouncement(name, weights, config)
    kind = type(shard).__name__
    return ModelAnnouncement(
        name, weights, config, shard_kind=SHARD_KINDS.get(kind, kind), shard_rank=int(shard.device_rank),
        shard_world=int(shard.world_size), layer_start=int(shard.start_layer), layer_end=int(shard.end_layer),
    )  # fmt: skip


def following(
    load: Callable[..., Any], folder_of: Callable[[Any], Path], loaded: Callable[[Any, Path, Files | None], None]
) -> Callable[..., Any]:
    """``load_mlx_items`` as EXO has it, a function or a generator, that tells ``loaded`` when it is done.

    ``loaded(shard, folder, files)``: the files are those before the load, None if they changed meanwhile.
    """

    def load_mlx_items(bound_instance: Any, *args: Any, **named: Any) -> Any:
        before = _seen(bound_instance, folder_of)
        result = load(bound_instance, *args, **named)
        if isgenerator(result):
            return _until_loaded(result, bound_instance, before)
        _tell(bound_instance, before)
        return result

    def _until_loaded(steps: Generator[Any, Any, Any], bound_instance: Any, before: Any) -> Generator[Any, Any, Any]:
        result = yield from steps
        _tell(bound_instance, before)
        return result

    def _tell(bound_instance: Any, before: Any) -> None:
        after = _seen(bound_instance, folder_of)
        if after is not None:
            shard, folder, files = after
            loaded(shard, folder, files if before is None or before[2] == files else None)

    return load_mlx_items


def _seen(bound_instance: Any, folder_of: Callable[[Any], Path]) -> tuple[Any, Path, Files] | None:
    try:
        shard = bound_instance.bound_shard
        folder = Path(folder_of(shard.model_card.model_id))
        return shard, folder, model_files(folder)
    except (TierKVError, OSError, AttributeError, TypeError, ValueError):
        return None
