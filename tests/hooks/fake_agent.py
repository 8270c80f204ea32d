"""An inference agent without vaults: keeps what hooks send in memory and gives it back. The socket is the real one."""

import asyncio
import threading

import numpy as np

from tierkv.handoff.protocol import layout_of, segment_view, segments_of
from tierkv.handoff.server import HandoffServer

BLOCK = 256


class Entry:
    def __init__(self, model, tokens, position, layout_blob):
        self.model, self.tokens, self.position, self.layout_blob = model, tokens[:position], position, layout_blob
        self.layout = layout_of(layout_blob)
        self.rows_from = None
        self.rows, self.whole, self.scalars = {}, {}, {}
        self.complete = False

    @property
    def only_rows(self):
        return len(self.layout.having("rows")) == len(self.layout.layers)


class FakeAgent:
    """``async with``-free: start() and stop() from a test's thread. ``log`` holds (op, fields) in order."""

    def __init__(self, path, **settings):
        self.path = path
        self.settings = {"min_store_tokens": 16, "min_restore_tokens": 16, "offer_budget_s": 5.0, **settings}
        self.entries, self.log, self.announced = [], [], {}
        self.offer_reason = ""
        self.restore_reason = ""
        self.reports = []
        self.connections = 0
        self.damage = lambda arrays: arrays
        self._pending = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server = HandoffServer(path, self, arena_bytes=16 << 20, settings=lambda: self.settings, node="fake")

    def start(self):
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(10)
        return self

    def stop(self):
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def ops(self, op):
        return [fields for name, fields in self.log if name == op]

    # --- HandoffService ---------------------------------------------------------------------------

    async def serve(self, connection):
        self.connections += 1
        while (message := await connection.receive()) is not None:
            if message.op != "free":
                self.log.append((message.op, dict(message.fields)))
            handler = getattr(self, f"on_{message.op}", None)
            if handler is not None:
                await handler(connection, message)

    async def on_announce(self, connection, message):
        self.announced[message.integer("model")] = message.table("announcement")

    async def on_report(self, connection, message):
        self.reports.append(message.table("stats"))
        await connection.send("settings", {"settings": self.settings, "models": {}})

    async def on_free(self, connection, message):
        connection.release(message.integer("offset"))

    async def on_offer(self, connection, message):
        cut = message.integer("tokens_bytes")
        tokens = np.frombuffer(message.blob[:cut], "<i8").copy()
        entry = Entry(message.integer("model"), tokens, message.integer("position"), bytes(message.blob[cut:]))
        held = [e for e in self.entries if e.complete and e.model == entry.model]
        reason = self.offer_reason
        if not reason and any(len(e.tokens) == len(tokens) and (e.tokens == tokens).all() for e in held):
            reason = "known"
        number = len(self._pending) + 1
        if not reason:
            self._pending[number] = entry
            entry.rows_from = 0 if entry.layout.having("rows") else None
        await connection.send("offer", {
            "id": message.integer("id"), "transfer": number, "rows_from": None if reason else entry.rows_from,
            "window": not reason and bool(entry.layout.having("window")),
            "state": not reason and bool(entry.layout.having("state")), "reason": reason,
        })  # fmt: skip

    async def on_begin(self, connection, message):
        entry = self._pending[message.integer("transfer")]
        entry.scalars = message.table("scalars")

    async def on_piece(self, connection, message):
        entry = self._pending[message.integer("transfer")]
        region = connection.region(message.integer("offset"), message.integer("bytes"))
        for segment in segments_of(message.fields["segments"], entry.layout, len(region)):
            view = segment_view(segment, entry.layout, region).copy()
            if entry.layout.layers[segment.layer].kind == "rows":
                entry.rows.setdefault((segment.layer, segment.array), []).append(view)
            else:
                entry.whole[segment.layer, segment.array] = view
        await connection.send("free", {"offsets": [message.integer("offset")]})

    async def on_end(self, connection, message):
        entry = self._pending[message.integer("transfer")]
        entry.rows = {key: np.concatenate(parts, axis=2) for key, parts in entry.rows.items()}
        entry.complete = True
        self.entries.append(entry)

    async def on_flush(self, connection, message):
        await connection.send("flushed", {"complete": True})

    async def on_restore(self, connection, message):
        number = message.integer("id")
        entry, position = self._best(message)
        if self.restore_reason or entry is None:
            await connection.send("none", {"id": number, "reason": self.restore_reason or "never_stored"})
            return
        first = message.integer("rows_from")
        await connection.send("plan", {"id": number, "position": position, "first_row": first}, entry.layout_blob)
        arrays = {key: rows[:, :, first:position] for key, rows in entry.rows.items()} | entry.whole
        for (layer, array), value in self.damage(arrays).items():
            value = np.ascontiguousarray(value)
            offset = await connection.allocate(max(1, value.nbytes))
            connection.region(offset, value.nbytes)[:] = value.tobytes()
            at = first if entry.layout.layers[layer].kind == "rows" else position
            segments = [[layer, array, at, 0, list(value.shape)]]
            body = {"id": number, "offset": offset, "bytes": value.nbytes, "segments": segments}
            await connection.send("piece", body)
        await connection.send("done", {
            "id": number, "position": position, "scalars": entry.scalars, "fidelity": 0, "codec": "raw",
            "bytes": sum(value.nbytes for value in arrays.values()),
        })  # fmt: skip

    def _best(self, message):
        tokens, limit, have = message.tokens(), message.integer("limit"), message.integer("have")
        best, at = None, have
        for entry in self.entries:
            n = min(len(tokens), len(entry.tokens))
            same = entry.tokens[:n] == tokens[:n]
            common = n if same.all() else int(np.argmin(same))
            position = min(common, limit) if entry.only_rows else entry.position
            if entry.model == message.integer("model") and at < position <= min(common, limit):
                best, at = entry, position
        return best, at
