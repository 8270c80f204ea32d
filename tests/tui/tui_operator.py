"""An operator whose vaults are a list in memory; what it was asked is in ``asked``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tui_cluster import GIB, MIB, START_UNIX_S

from tierkv.errors import Fault, Refused, Unreachable
from tierkv.rpc.admin import PrefixSummary, PurgePlan, RecordLine
from tierkv.rpc.config_port import (
    Acknowledged,
    Checked,
    ConfigApplied,
    ConfigCheck,
    ConfigEffect,
    ConfigState,
    ConfigValue,
)
from tierkv.telemetry.explanation import Explanation, RequestLine, TierFinding
from tierkv.tui.operate import Done, Holder, PrefixList, PrefixRow, Preview, Purged, RequestRow, Selection, chosen

NAS = Holder("127.0.0.1:50051", "nas")


def prefix(number: int, **values) -> PrefixSummary:
    """Prefix 1 has 256 tokens and 1 MiB, prefix 2 twice that; the later the number the longer ago it was used."""
    fields = {
        "leaf_key": bytes([number]) * 32, "root": b"r" * 32, "model": "models/SmolLM2-135M", "tokens": 256 * number,
        "own_bytes": number * MIB, "total_bytes": 4 * number * MIB, "records": number,
        "created_unix_s": START_UNIX_S - 600, "last_hit_unix_s": START_UNIX_S - 10 * number, "hits": 10 - number,
        "pinned": number == 2, "fidelity": 3, "codecs": ("int8",), "tier": "kv",
    }  # fmt: skip
    return PrefixSummary(**{**fields, **values})


class FakeOperator:
    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.held = [prefix(1), prefix(2), prefix(3)]
        self.effects: Mapping[str, Sequence[ConfigEffect]] = {}
        self.faults: tuple[Fault, ...] = ()
        self.refusing = ""
        self.absent: tuple[str, ...] = ()
        self.lines = [
            RequestLine(7, START_UNIX_S, "models/SmolLM2-135M", 900, 3, 898, "restored", "", 0.7),
            RequestLine(6, START_UNIX_S - 9, "models/SmolLM2-135M", 900, 3, 0, "computed", "evicted", 13.0),
        ]
        kv = TierFinding("kv", NAS.address, True, 897, 0, 0, 0, (), {"lossy": 2}, 0.002, "evicted", "it left at 07:20")
        self.explained: Explanation | str = Explanation(
            self.lines[1], "900 tokens were computed: the vault evicted them a minute before.", (kv,), "ab12" * 8,
            "01" * 32, expected_restore_s=0.3, expected_prefill_s=12.0,
        )  # fmt: skip

    async def prefixes(self, holders):
        return PrefixList(tuple(PrefixRow(NAS, one) for one in self.held), len(self.held))

    async def records(self, holders, key):
        line = RecordLine(key, 1, 0, 256, MIB, 3, "int8", START_UNIX_S, START_UNIX_S - 5, 4, False, False)
        last = RecordLine(bytes(32), 1, 256, 300, MIB, 3, "int8", START_UNIX_S, START_UNIX_S - 5, 4, False, True)
        return [(NAS, (line, last)), (Holder("127.0.0.1:50052", "pi"), (line,))]

    async def pin(self, holders, what, on):
        self.asked.append(("pin", what, on))
        return [Done(one, 3) for one in chosen(holders, what)]

    async def preview(self, holders, what: Selection):
        self.asked.append(("preview", what))
        plan = PurgePlan("token", 6, 12 * MIB, 3, 1536, 1, tuple(self.held))
        return [Preview(one, plan if one == NAS else None, "" if one == NAS else "no answer") for one in holders]

    async def purge(self, previews):
        self.asked.append(("purge", [one.plan.token for one in previews if one.plan]))
        self.held = []
        return [Purged(NAS, 6, 12 * MIB, "undo", 60.0)]

    async def undo(self, purged):
        self.asked.append(("undo", [one.undo_token for one in purged]))
        self.held = [prefix(1)]
        return [Done(one.holder, one.records) for one in purged]

    async def requests(self, holders):
        self.asked.append(("requests", [one.name for one in holders]))
        return [RequestRow(one, line) for one in holders for line in self.lines], []

    async def explain(self, holder, number):
        self.asked.append(("explain", holder.name, number))
        return self.explained

    async def config(self, address):
        return ConfigState(
            3, "/etc/tierkv/tierkv.toml",
            (ConfigValue("vault.max_bytes", 4 * GIB, "/etc/tierkv/tierkv.toml:2", True, 4 * GIB),
             ConfigValue("vault.port", 50051, "--port", False, 6000)),
        )  # fmt: skip

    async def check(self, addresses, changes):
        self.asked.append(("check", dict(changes)))
        found = []
        for address in addresses:
            if address in self.absent:
                found.append(Checked(address, error=Unreachable(address, "connection refused")))
            else:
                default = tuple(ConfigEffect(key, None, value, "not_used") for key, value in changes.items())
                effects = tuple(self.effects.get(address, default))
                found.append(Checked(address, ConfigCheck(1, effects, self.faults)))
        return found

    async def apply(self, checked, changes):
        self.asked.append(("apply", dict(changes)))
        if self.refusing:
            return [
                Acknowledged(one.peer, error=Refused("pinned"))
                if one.peer == self.refusing
                else Acknowledged(one.peer, ConfigApplied(2, (), "u"), taken_back=True)
                for one in checked
                if one.ready
            ]
        return [Acknowledged(one.peer, ConfigApplied(2, one.check.effects, "u")) for one in checked if one.ready]
