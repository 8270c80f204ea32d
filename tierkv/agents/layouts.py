"""Layouts that the agent has seen, by digest: parsed once, however many records carry them."""

from __future__ import annotations

import json
from collections import OrderedDict

from tierkv.handoff.protocol import layout_of
from tierkv.state.layout import Layout

MAX_LAYOUTS = 1024


class Layouts:
    """Least recently used are forgotten. Owned by the event loop."""

    def __init__(self) -> None:
        self._by_digest: OrderedDict[bytes, Layout] = OrderedDict()
        self._by_json: OrderedDict[bytes, tuple[Layout, bytes]] = OrderedDict()

    def get(self, digest: bytes) -> Layout | None:
        return self._by_digest.get(digest)

    def learn(self, layout: Layout) -> Layout:
        """The layout is known under its digest."""
        return self._keep(layout)[0]

    def parse(self, text: bytes) -> tuple[Layout, bytes]:
        """The layout in a message, and its digest. Raises HandoffError."""
        held = self._by_json.get(text)
        return held if held is not None else self._keep(layout_of(text), text)

    def _keep(self, layout: Layout, text: bytes = b"") -> tuple[Layout, bytes]:
        digest = layout.digest()
        self._by_digest.setdefault(digest, layout)
        self._by_digest.move_to_end(digest)
        kept = self._by_digest[digest]
        if text:
            self._by_json[text] = (kept, digest)
        for table in (self._by_digest, self._by_json):
            if len(table) > MAX_LAYOUTS:
                table.popitem(last=False)
        return kept, digest


def signature_json(layout: Layout) -> str:
    """The layout's signature as canonical text, so that it can be compared with one that came as JSON."""
    return json.dumps(layout.signature(), separators=(",", ":"))
