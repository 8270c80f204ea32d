"""kill -9 of a vault's store at random moments of a mixed load: ``tierkv bench vault-kill --kills 1000 [--json]``.

A child process puts, improves, reads, pins, purges and takes back, sweeps and compacts in one folder, and says on a
pipe what it is about to do and what was acknowledged. It is killed at a random moment; then the folder is opened again
and compared: nothing acknowledged may be lost, nothing damaged served, nothing purged be back, and the index must be
what the data alone say. Real files, a real SIGKILL, real processes. With ``--durability none``, which acknowledges from
memory, what is lost is only counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np
from _scratch import scratch_folder

from tierkv.codec.frame import FrameHeader, FrameType, payload_hash
from tierkv.codec.record import RecordHeader, RecordKind, verify_record
from tierkv.errors import CorruptionError, Refused, StaleEpoch
from tierkv.identity.blocks import BlockKey, block_key
from tierkv.store.base import Selector
from tierkv.store.disk import DiskStore
from tierkv.store.disk_options import DiskOptions, Durability

CHAINS, BLOCKS = 12, 4
MIB = 1 << 20
ROOTS = [BlockKey(bytes([number + 1]) * 32) for number in range(3)]


@dataclass
class Outcome:
    """What must be 0 is 0, or the vault is wrong."""

    kills: int = 0
    acknowledged_lost: int = 0
    damaged_served: int = 0
    resurrected: int = 0
    index_differs: int = 0
    acknowledged: int = 0
    purges: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Versions:
    """A key's records by fidelity: the exact one and a lossier one."""

    key: BlockKey
    root: BlockKey
    data: dict[int, bytes]


def make_universe(seed: int) -> list[Versions]:
    source = np.random.default_rng(seed)
    found: list[Versions] = []
    for chain in range(CHAINS):
        root = ROOTS[chain % len(ROOTS)]
        parent = root
        for block in range(BLOCKS):
            tokens = np.arange(256, dtype=np.int64) + chain * 100_000 + block * 256
            data = {f: _record(source, tokens, parent, root, block * 256, f) for f in (0, 20)}
            key = block_key(parent, tokens, (), block * 256)
            found.append(Versions(key, root, data))
            parent = key
    return found


def _record(
    source: np.random.Generator, tokens: np.ndarray, parent: BlockKey, root: BlockKey, start: int, fidelity: int
) -> bytes:
    body, raw = b"", 0
    for layer in range(3):
        payload = source.bytes(int(source.integers(1_000, 60_000)))
        body += FrameHeader(
            FrameType.SEGMENT, 0, "uint8", (len(payload),), start, len(payload), len(payload), payload_hash(payload),
            layer=layer,
        ).pack() + payload  # fmt: skip
        raw += len(payload)
    header = RecordHeader(
        RecordKind.BLOCK, block_key(parent, tokens, (), start), parent, root, tokens, start, b"d" * 16, b"layout",
        fidelity, 0, 0.0, 3, len(body), raw, root.hex()[:2], "raw",
    )  # fmt: skip
    return header.pack_frame() + body


def open_store(folder: Path, durability: Durability = "batched") -> DiskStore:
    options = DiskOptions(
        disk_bytes=96 * MIB, ram_bytes=4 * MIB, segment_bytes=MIB, min_free_bytes=0, sync_s=0.02, undo_s=5.0,
        page_bytes=4096, compact_bytes_per_s=64 * MIB, durability=durability,
    )  # fmt: skip
    return DiskStore(folder, options, load_in_background=False)


# --- the child ------------------------------------------------------------------------------------


def work(folder: Path, universe: list[Versions], pipe: int, seed: int, durability: Durability) -> None:
    """Runs until it is killed."""
    chance = random.Random(seed)
    store = open_store(folder, durability)

    def say(*words: object) -> None:
        os.write(pipe, json.dumps(words).encode() + b"\n")

    say("ready")
    old_epoch = store.epoch
    undo = ""
    while True:
        roll = chance.random()
        if roll < 0.55:
            _put(store, chance, universe, say, store.epoch if chance.random() < 0.9 else old_epoch)
        elif roll < 0.8:
            with_reader = store.open(chance.choice(universe).key)
            if with_reader is not None:
                with with_reader:
                    verify_record(with_reader.read(0, with_reader.size_bytes))
        elif roll < 0.86:
            old_epoch = store.epoch
            undo = _purge(store, chance, universe, say)
        elif roll < 0.9 and undo:
            say("undo")
            try:
                store.undo_purge(undo)
                say("undone", _here(store, universe))
            except Refused:
                say("undone", _here(store, universe))
            undo = ""
        elif roll < 0.94:
            (store.pin if chance.random() < 0.3 else store.unpin)(Selector(root=chance.choice(ROOTS)))
        elif roll < 0.98:
            store.sweep()
        else:
            list(store.compact())


def _put(store: DiskStore, chance: random.Random, universe: list[Versions], say, epoch: int) -> None:
    number = chance.randrange(len(universe))
    fidelity = chance.choice((0, 20))
    data = universe[number].data[fidelity]
    say("put", number, fidelity)
    try:
        writer = store.begin(len(data), epoch)
        for at in range(0, len(data), 30_000):
            writer.write(data[at : at + 30_000])
        outcome = writer.commit()
    except StaleEpoch:
        say("stale", number)
        return
    say("stored", number, fidelity, outcome)


def _purge(store: DiskStore, chance: random.Random, universe: list[Versions], say) -> str:
    preview = store.preview_purge(Selector(root=chance.choice(ROOTS)))
    say("purge")
    result = store.purge(preview.token)
    say("purged", _here(store, universe))
    return result.undo_token


def _here(store: DiskStore, universe: list[Versions]) -> list[list[int]]:
    entries = store.lookup([each.key for each in universe])
    return [[n, entry.header.fidelity] for n, entry in enumerate(entries) if entry is not None]


# --- the judge ------------------------------------------------------------------------------------


class Judge:
    """What must be in the folder, from what the child said: number -> fidelity; and what was in the making."""

    def __init__(self, universe: list[Versions], outcome: Outcome) -> None:
        self.universe = universe
        self.outcome = outcome
        self.must: dict[int, int] = {}
        self.busy: tuple[object, ...] = ()

    def hear(self, lines: list[bytes]) -> None:
        for line in lines:
            word, *rest = json.loads(line)
            if word in ("put", "purge", "undo"):
                self.busy = (word, *rest)
                continue
            self.busy = ()
            if word == "stored":
                number, fidelity, outcome = rest
                self.outcome.acknowledged += 1
                if outcome != "present":
                    self.must[number] = fidelity
            elif word in ("purged", "undone"):
                self.outcome.purges += word == "purged"
                self.must = dict(rest[0])

    def compare(self, folder: Path, kill: int) -> None:
        """Opens the folder and judges it; afterwards what is there is what must be there."""
        store = open_store(folder)
        try:
            seen = {n: self._served(store, n, kill) for n in range(len(self.universe))}
        finally:
            store.close()
        for number, fidelity in seen.items():
            self._judge(number, fidelity, kill)
        self.must = {number: fidelity for number, fidelity in seen.items() if fidelity is not None}
        self.busy = ()
        if kill % 10 == 0:
            self._rebuild(folder, kill)

    def _served(self, store: DiskStore, number: int, kill: int) -> int | None:
        """The fidelity of the record that is served, byte for byte one that was stored; None if none is."""
        versions = self.universe[number]
        try:
            reader = store.open(versions.key)
            if reader is None:
                return None
            with reader:
                data = reader.read(0, reader.size_bytes)
        except (CorruptionError, OSError) as error:
            self._note(kill, f"record {number} cannot be read: {error}")
            return None
        for fidelity, right in versions.data.items():
            if data == right:
                return fidelity
        self.outcome.damaged_served += 1
        self._note(kill, f"record {number} is damaged")
        return None

    def _judge(self, number: int, seen: int | None, kill: int) -> None:
        must = self.must.get(number)
        if seen == must:
            return
        word, *rest = self.busy or ("",)
        # Half done is allowed, since it was not acknowledged: a purge only takes away, taking it back only brings.
        # What an undo brings back takes the place of what came under its key in the meantime, if it is more exact.
        if word == "purge" and seen is None:
            return
        if word == "undo" and seen is not None and (must is None or seen < must):
            return
        if word == "put" and rest[0] == number and seen is not None and seen == rest[1]:
            return
        if seen is None or (must is not None and seen > must):
            self.outcome.acknowledged_lost += 1
            self._note(kill, f"record {number}: acknowledged {must}, found {seen}, busy {self.busy}")
        else:
            self.outcome.resurrected += 1
            self._note(kill, f"record {number}: found {seen}, expected {must}, busy {self.busy}")

    def _rebuild(self, folder: Path, kill: int) -> None:
        """The index from the data alone is the same as with hints."""
        for path in folder.glob("*.hint"):
            path.unlink()
        store = open_store(folder)
        here = dict(map(tuple, _here(store, self.universe)))
        store.close()
        if here != self.must:
            self.outcome.index_differs += 1
            self._note(kill, f"the data say {here}, the index said {self.must}")

    def _note(self, kill: int, text: str) -> None:
        if len(self.outcome.notes) < 20:
            self.outcome.notes.append(f"kill {kill}: {text}")


def run(kills: int, seed: int, folder: Path, longest_s: float = 0.08, durability: Durability = "batched") -> Outcome:
    """Kills a child ``kills`` times and judges every time."""
    chance = random.Random(seed)
    universe = make_universe(seed)
    outcome = Outcome()
    judge = Judge(universe, outcome)
    began = time.perf_counter()
    for kill in range(1, kills + 1):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(reading)
                work(folder, universe, writing, chance.randrange(1 << 30) + kill, durability)
            finally:
                os._exit(3)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            heard = pipe.readline()
            if chance.random() < 0.9:
                time.sleep(chance.random() * longest_s)
            os.kill(child, signal.SIGKILL)
            lines = [heard, *pipe.readlines()]
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise RuntimeError("the child ended by itself: see its traceback above")
        judge.hear([line for line in lines if line.endswith(b"\n")])
        judge.compare(folder, kill)
        outcome.kills = kill
        chance.random()
    outcome.seconds = round(time.perf_counter() - began, 3)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="to see the same load again (not the same moments)")
    parser.add_argument("--durability", choices=get_args(Durability), default="batched", help="of the vault")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    with scratch_folder() as folder:
        outcome = run(options.kills, seed, folder / "vault", durability=options.durability)
    bad = outcome.damaged_served + outcome.resurrected + outcome.index_differs
    if options.durability != "none":
        bad += outcome.acknowledged_lost
    if options.json:
        print(json.dumps({"schema": "tierkv.bench.vault-kill/1", **asdict(outcome), "seed": seed}, indent=2))
    else:
        for name, value in asdict(outcome).items():
            print(f"{name:<20}{value}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
