"""What EXO's prefix cache does, seen from outside, for machines without EXO.

Not EXO's code: a cache of the same shape and behaviour, written against what the tests that compare it with the real
thing demand. A test that runs on both proves that the two agree.
"""

import copy
import gc
import types

import mlx.core as mx
import psutil
from mlx_lm.models import cache as mlx_caches

_MEMORY_THRESHOLD = 0.7
KV_CACHE_BITS, CACHE_GROUP_SIZE = None, 64
WHOLE = (mlx_caches.ArraysCache, mlx_caches.RotatingKVCache)


class CacheSnapshot:
    def __init__(self, states, token_count):
        self.states, self.token_count = states, token_count


def fresh_copy(array):
    """The same bits in memory of their own."""
    made = mx.array(array) + 0 if array.dtype != mx.bfloat16 else array.astype(mx.float32).astype(mx.bfloat16)
    mx.eval(made)
    return made


def is_deepseek(layer):
    return type(layer).__name__ == "DeepseekV4Cache"


def is_whole(layer):
    """Whether the layer cannot be trimmed back: its state is known where it was copied."""
    if isinstance(layer, mlx_caches.CacheList):
        return not layer.is_trimmable()
    return is_deepseek(layer) or isinstance(layer, WHOLE)


def copy_state(layer):
    if is_deepseek(layer):
        made = copy.deepcopy(layer)
        made.local = copy_state(layer.local) or made.local
        return made
    if isinstance(layer, mlx_caches.CacheList):
        if layer.is_trimmable():
            return None
        return mlx_caches.CacheList(*(copy_state(each) or copy.deepcopy(each) for each in layer.caches))
    if isinstance(layer, mlx_caches.ArraysCache):
        made = mlx_caches.ArraysCache(len(layer.cache))
        made.cache = [None if each is None else fresh_copy(each) for each in layer.cache]
        return made
    if not isinstance(layer, mlx_caches.RotatingKVCache) or layer.keys is None:
        return None
    rows = min(layer.max_size, layer.keys.shape[2])
    made = mlx_caches.RotatingKVCache(layer.max_size, keep=layer.keep)
    made.keys, made.values = (fresh_copy(each[..., -rows:, :]) for each in (layer.keys, layer.values))
    made.offset, made._idx = layer.offset, rows
    return made


def snapshot_ssm_states(cache):
    return CacheSnapshot([copy_state(layer) for layer in cache], cache_length(cache))


def has_non_kv_caches(cache):
    return any(is_whole(layer) for layer in cache)


def cache_length(cache):
    return max(
        (cache_length(getattr(layer, "caches", ())) or getattr(layer, "offset", 0) for layer in cache), default=0
    )


def make_kv_cache(model):
    if hasattr(model, "make_cache"):
        return model.make_cache()
    if KV_CACHE_BITS is None:
        return [mlx_caches.KVCache() for _ in model.layers]
    return [mlx_caches.QuantizedKVCache(CACHE_GROUP_SIZE, KV_CACHE_BITS) for _ in model.layers]


def get_memory_used_percentage():
    return psutil.virtual_memory().percent / 100


def common_length(one, other):
    a, b = one.tolist(), other.tolist()
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class KVPrefixCache:
    # Until 22 April 2026 tokens were taken for reused that an entry of rows does not have.
    skips = False

    def __init__(self, group):
        self.prompts, self.caches, self._snapshots, self._media_regions = [], [], [], []
        self._last_used, self.prefill_tps = [], []
        self._access_counter, self._group = 0, group

    @property
    def _slots(self):
        return (self.prompts, self.caches, self._snapshots, self._media_regions, self._last_used, self.prefill_tps)

    def clear(self):
        for slots in self._slots:
            slots.clear()

    def add_kv_cache(self, prompt_tokens, cache, ssm_snapshots=None, media_regions=None, prefill_tps=0.0):
        self._evict_if_needed()
        self._access_counter += 1
        entry = (prompt_tokens, copy.deepcopy(cache), ssm_snapshots, media_regions or [], self._access_counter)
        for slots, value in zip(self._slots, (*entry, prefill_tps), strict=True):
            slots.append(value)

    def update_kv_cache(self, index, prompt_tokens, cache, snapshots, restore_pos, media_regions=None, prefill_tps=0.0):
        self._access_counter += 1
        kept = [each for each in self._snapshots[index] or [] if each.token_count <= restore_pos]
        entry = (
            prompt_tokens, copy.deepcopy(cache), [*kept, *(snapshots or [])] or None, media_regions or [],
            self._access_counter,
        )  # fmt: skip
        for slots, value in zip(self._slots, (*entry, prefill_tps), strict=True):
            slots[index] = value

    def get_kv_cache(self, model, prompt_tokens, media_regions=None):
        n = len(prompt_tokens)
        index, length, exact = None, 0, False
        for i, stored in enumerate(self.prompts):
            same = self._same_media(common_length(prompt_tokens, stored), self._media_regions[i], media_regions or [])
            if same >= n - 1:
                index, length, exact = i, same, True
                break
            if same > length:
                index, length = i, same
        if index is None:
            return make_kv_cache(model), prompt_tokens, None, False
        stands_at, state = cache_length(self.caches[index]), None
        if has_non_kv_caches(self.caches[index]):
            usable = [each for each in self._snapshots[index] or [] if each.token_count <= length]
            if not usable:
                return make_kv_cache(model), prompt_tokens, None, False
            state = max(usable, key=lambda each: each.token_count)
            at = state.token_count
        else:
            at = n - 1 if exact else length
            at = at if self.skips else min(stands_at, at)
        cache = copy.deepcopy(self.caches[index])
        if stands_at > at:
            cut(cache, stands_at - at, state)
        self._access_counter += 1
        self._last_used[index] = self._access_counter
        return cache, prompt_tokens[at:], index, exact

    @staticmethod
    def _same_media(length, stored, asked):
        by_start = {region.start_pos: region.content_hash for region in asked}
        for region in stored:
            if region.start_pos >= length:
                break
            if by_start.get(region.start_pos, region.content_hash) != region.content_hash:
                return region.start_pos
        return length

    def _evict_if_needed(self):
        evicted = False
        while self.caches and self.get_memory_used_percentage() > _MEMORY_THRESHOLD:
            oldest = self._last_used.index(min(self._last_used))
            for slots in self._slots:
                slots.pop(oldest)
            evicted = True
        if evicted:
            gc.collect()
            mx.clear_cache()

    def get_memory_used_percentage(self):
        mine = get_memory_used_percentage()
        if self._group is None:
            return mine
        every = mx.distributed.all_gather(mx.array([mine], dtype=mx.float32), group=self._group)
        return float(mx.max(every).item())


class OldKVPrefixCache(KVPrefixCache):
    """As EXO 1.0.68 and 1.0.69: no images, no prefill rates, an answer of three."""

    skips = True

    def __init__(self, group):
        super().__init__(group)
        del self._media_regions, self.prefill_tps

    @property
    def _slots(self):
        return (self.prompts, self.caches, self._snapshots, self._last_used)

    def add_kv_cache(self, prompt_tokens, cache, ssm_snapshots=None):
        self._evict_if_needed()
        self._access_counter += 1
        entry = (prompt_tokens, copy.deepcopy(cache), ssm_snapshots, self._access_counter)
        for slots, value in zip(self._slots, entry, strict=True):
            slots.append(value)

    def update_kv_cache(self, index, prompt_tokens, cache, snapshots, restore_pos):
        self._access_counter += 1
        kept = [each for each in self._snapshots[index] or [] if each.token_count <= restore_pos]
        entry = (prompt_tokens, copy.deepcopy(cache), [*kept, *(snapshots or [])] or None, self._access_counter)
        for slots, value in zip(self._slots, entry, strict=True):
            slots[index] = value

    def get_kv_cache(self, model, prompt_tokens):
        self._media_regions = [[]] * len(self.prompts)
        answer = super().get_kv_cache(model, prompt_tokens)
        del self._media_regions
        return answer[:3]


class FirstKVPrefixCache(OldKVPrefixCache):
    """As in February 2026: the group may be left out."""

    def __init__(self, group=None):
        super().__init__(group)


class MediaKVPrefixCache(KVPrefixCache):
    """As EXO from 30 March to 14 April 2026: images, no prefill rates, an answer of three."""

    skips = True

    def __init__(self, group):
        super().__init__(group)
        del self.prefill_tps

    @property
    def _slots(self):
        return (self.prompts, self.caches, self._snapshots, self._media_regions, self._last_used)

    def add_kv_cache(self, prompt_tokens, cache, ssm_snapshots=None, media_regions=None):
        self._evict_if_needed()
        self._access_counter += 1
        entry = (prompt_tokens, copy.deepcopy(cache), ssm_snapshots, media_regions or [], self._access_counter)
        for slots, value in zip(self._slots, entry, strict=True):
            slots.append(value)

    def update_kv_cache(self, index, prompt_tokens, cache, snapshots, restore_pos, media_regions=None):
        self._access_counter += 1
        kept = [each for each in self._snapshots[index] or [] if each.token_count <= restore_pos]
        entry = (
            prompt_tokens, copy.deepcopy(cache), [*kept, *(snapshots or [])] or None, media_regions or [],
            self._access_counter,
        )  # fmt: skip
        for slots, value in zip(self._slots, entry, strict=True):
            slots[index] = value

    def get_kv_cache(self, model, prompt_tokens, media_regions=None):
        return super().get_kv_cache(model, prompt_tokens, media_regions)[:3]


class NamedKVPrefixCache(KVPrefixCache):
    """As a proposed EXO that writes to disk: it takes the model's name and keeps more than the lists."""

    def __init__(self, group, model_id=""):
        super().__init__(group)
        self._model_id, self._disk_dir, self._disk_dirty = model_id, None, False


def cut(cache, tokens, snapshot):
    for number, layer in enumerate(cache):
        # Nothing is cut of a DeepseekV4Cache, nor put back: it stays where it was.
        if is_deepseek(layer) or not is_whole(layer):
            layer.trim(tokens)
        elif snapshot is not None and snapshot.states[number] is not None:
            cache[number] = copy_state(snapshot.states[number])
        elif isinstance(layer, mlx_caches.RotatingKVCache):
            cache[number] = mlx_caches.RotatingKVCache(layer.max_size, keep=layer.keep)
        elif isinstance(layer, mlx_caches.CacheList):
            inner = list(layer.caches)
            cut(inner, tokens, None)
            cache[number] = mlx_caches.CacheList(*inner)
        else:
            cache[number] = mlx_caches.ArraysCache(len(layer.cache))


def module():
    """A copy of this module that a test may hook without touching the others'."""
    made = types.ModuleType("exo_stand_in_copy")
    with open(__file__, encoding="utf-8") as source:
        exec(compile(source.read(), __file__, "exec"), made.__dict__)
    return made
