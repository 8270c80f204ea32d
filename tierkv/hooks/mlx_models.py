"""Which model an mlx-lm server has loaded: its files as they were at that moment, and what its caches look like."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierkv.errors import TierKVError, UnsupportedState
from tierkv.handoff.client import FileSeen, HandoffClient, ModelAnnouncement, ModelHandle, model_files
from tierkv.state import mlx_cache

log = logging.getLogger("tierkv")

ModelKey = tuple[Any, ...]
Files = tuple[FileSeen, ...]
CHUNKED = "ChunkedKVCache"
# Further than any prompt reaches.
NO_END = 1 << 48


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One form of a model's cache: the handle that names it to the agent, and the signature of such a cache.

    A cache has this form while it stands at a position in [first, last].
    """

    handle: ModelHandle
    signature: mlx_cache.Signature
    first: int = 0
    last: int = NO_END


@dataclass(frozen=True, slots=True)
class _Known:
    """``forms``: those of long caches first. ``drafts``: a draft model's caches follow the model's own."""

    forms: tuple[LoadedModel, ...] = ()
    drafts: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Form:
    said: ModelAnnouncement
    signature: mlx_cache.Signature
    first: int = 0
    last: int = NO_END


@dataclass(frozen=True, slots=True)
class SeenFiles:
    weights: Files
    adapter: Files
    draft: Files = ()


class ModelBook:
    """What is known of every model that the server loaded, by the server's own model key.

    Caches of some models change their form as they grow: with kv_bits, plain rows become quantised ones at
    ``quantized_kv_start``; chunked attention drops rows behind its first chunk. Each form is announced as a model of
    its own, since what its blocks hold for the same tokens differs.
    """

    def __init__(self, client: HandoffClient) -> None:
        self._client = client
        self._known: dict[ModelKey, _Known] = {}

    def of_prompt(self, key: ModelKey, n_tokens: int) -> tuple[LoadedModel, ...]:
        """The forms that a cache of at most ``n_tokens`` tokens of this model can have, that of the longest first.

        Raises UnsupportedState if the model is not known or not carried.
        """
        return tuple(form for form in self._find(key).forms if form.first <= n_tokens)

    def of_cache(self, key: ModelKey, cache: Sequence[Any]) -> LoadedModel:
        """What this live cache belongs to. Raises UnsupportedState likewise, and for a form that was not expected."""
        signature = mlx_cache.expected_signature(cache)
        for form in self._find(key).forms:
            if form.signature == signature:
                return form
        raise UnsupportedState("foreign_layout", f"a cache of {key[0]} that its model does not make")

    def handle_of(self, key: ModelKey, n_tokens: int) -> ModelHandle | None:
        """What names such a cache to the agent; None where nothing is carried of the model."""
        known = self._known.get(key, _Known())
        return next((form.handle for form in known.forms if form.first <= n_tokens), None)

    def names(self, key: ModelKey, handle: ModelHandle) -> bool:
        """Whether this handle is that of one of the model's forms."""
        return any(form.handle is handle for form in self._known.get(key, _Known()).forms)

    def drafts(self, key: ModelKey) -> bool:
        """Whether a draft model's caches are in the same list, which may be a token behind."""
        known = self._known.get(key)
        return known is not None and known.drafts

    def _find(self, key: ModelKey) -> _Known:
        known = self._known.get(key)
        if known is None:
            raise UnsupportedState("model_unknown", f"nothing is known of the model {key[0]}")
        if known.reason:
            raise UnsupportedState(known.reason, f"the state of {key[0]} is not carried: {known.reason}")
        return known

    def loaded(self, key: ModelKey, before: SeenFiles | None, provider: Any, fresh: Sequence[Any]) -> None:
        """The model ``key`` is loaded and can be looked up; its files are those of ``before`` and unchanged since.

        ``fresh`` is an empty cache of the model, with that of its draft model behind it.
        """
        try:
            self._known[key] = self._learn(key, before, provider, fresh)
        except (TierKVError, OSError) as error:
            reason = error.reason if isinstance(error, UnsupportedState) else "model_files"
            log.warning("%s is served without tiers: %s", key[0], error)
            self._known[key] = _Known(reason=reason)

    def _learn(self, key: ModelKey, before: SeenFiles | None, provider: Any, fresh: Sequence[Any]) -> _Known:
        after = seen_files(key)
        if after is None or (before is not None and before != after):
            raise UnsupportedState("model_files", "the model's files changed while it was loaded")
        said = ModelAnnouncement(
            name=_name(key), weights=after.weights, adapter=after.adapter, draft=after.draft, config=_config_text(key)
        )
        forms = [_Form(said, mlx_cache.expected_signature(fresh))]
        forms = _chunked(_quantised(forms, provider.cli_args, fresh))
        loaded = [
            LoadedModel(self._client.announce(form.said), form.signature, form.first, form.last) for form in forms
        ]
        loaded.sort(key=lambda form: -form.first)
        return _Known(tuple(loaded), drafts=bool(after.draft))


def _quantised(forms: list[_Form], args: Any, fresh: Sequence[Any]) -> list[_Form]:
    """With kv_bits: the plain form until ``quantized_kv_start``, then one of quantised rows."""
    if not getattr(args, "kv_bits", None):
        return forms
    bits, group, start = int(args.kv_bits), int(args.kv_group_size), int(args.quantized_kv_start)
    try:
        made = [c.to_quantized(group_size=group, bits=bits) if hasattr(c, "to_quantized") else c for c in fresh]
    except NotImplementedError:  # a ring has the method and cannot do it; the engine fails there as well
        return forms
    (plain,), signature = forms, mlx_cache.expected_signature(made)
    if signature == plain.signature:
        return forms
    said = replace(plain.said, kv_bits=bits, kv_group_size=group, quantized_kv_start=start)
    return [replace(plain, last=start - 1), _Form(said, signature, first=start)]


def _chunked(forms: list[_Form]) -> list[_Form]:
    """Chunked attention: each form as it is, and once more as it is when its chunks have dropped rows."""
    found = list(forms)
    for form in forms:
        chunks = [dict(params)["chunk_size"] for _, name, _, params in form.signature if name == CHUNKED]
        if chunks:
            signature = tuple(
                ("window" if name == CHUNKED else kind, name, slot, params)
                for kind, name, slot, params in form.signature
            )
            said = replace(form.said, max_kv_size=min(chunks))
            found.append(_Form(said, signature, max(form.first, min(chunks)), form.last))
    return found


def seen_files(key: ModelKey) -> SeenFiles | None:
    """The files of a model key as they are now; None if they are not on this machine (yet)."""
    found: list[Files] = []
    for part in (*key, None, None)[:3]:
        folder = folder_of(part) if part is not None else None
        if part is not None and folder is None:
            return None
        found.append(model_files(folder) if folder is not None else ())
    return SeenFiles(*found) if found[0] else None


def folder_of(path_or_repo: Any) -> Path | None:
    """The folder that mlx-lm loads: a path as it is, a hub repository as its snapshot on this disk."""
    path = Path(str(path_or_repo))
    if path.exists():
        return path.resolve()
    from mlx_lm.utils import hf_repo_to_path

    try:
        return hf_repo_to_path(str(path_or_repo))
    except (OSError, ValueError):  # huggingface_hub: not a repository id, or nothing of it on this disk
        return None


def _name(key: ModelKey) -> str:
    path = Path(str(key[0]))
    return path.name if path.exists() else str(key[0])


def _config_text(key: ModelKey) -> str:
    folder = folder_of(key[0])
    return (folder / "config.json").read_text(encoding="utf-8") if folder is not None else ""
