"""Both ends of the hand-off, with a service that a test scripts: budgets, flow control, reconnecting, bad peers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tierkv.errors import HandoffError, StartupError
from tierkv.handoff.channel import Channel
from tierkv.handoff.client import FileSeen, HandoffClient, ModelAnnouncement, NotRestored, Offer, Restored
from tierkv.handoff.mover import Mover
from tierkv.handoff.protocol import VERSION, Message, pack, segment_view, segments_of
from tierkv.handoff.server import Connection, HandoffServer
from tierkv.handoff.transfer import Transfer
from tierkv.state.layout import ArraySpec, LayerLayout, Layout

LAYOUT = Layout(
    (
        LayerLayout("rows", "KVCache", (ArraySpec("k", "float32", (1, 2, -1, 4)),)),
        LayerLayout("state", "ArraysCache", (ArraySpec("0", "bfloat16", (1, 8)), ArraySpec("1", "none", ()))),
    )
)
MODEL = ModelAnnouncement("m", (FileSeen("/m.safetensors", 1, 2, 3, 4),))
ARENA_BYTES = 1 << 20

Handler = Callable[[Connection, Message], Awaitable[None]]


class Agent:
    """A server in a thread of its own; ``on[op]`` answers, everything is kept in ``log``."""

    def __init__(self, path: Path, arena_bytes: int = ARENA_BYTES) -> None:
        self.path = path
        self.on: dict[str, Handler] = {}
        self.log: list[Message] = []
        self.counts: list[str] = []
        self.connections: list[Connection] = []
        self.loop = asyncio.new_event_loop()
        self.server = HandoffServer(
            path,
            self,
            arena_bytes=arena_bytes,
            settings=lambda: {"min_store_tokens": 5},
            node="n",
            count=self.counts.append,
        )
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.call(self.server.start())

    def call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    async def serve(self, connection: Connection) -> None:
        self.connections.append(connection)
        while (message := await connection.receive()) is not None:
            self.log.append(message)
            if message.op == "free":
                connection.release(message.integer("offset"))
            elif message.op == "restore" and "restore" in self.on:
                self.restoring = asyncio.create_task(
                    self.on["restore"](connection, message)
                )  # frees are read meanwhile
            elif message.op in self.on:
                await self.on[message.op](connection, message)

    def ops(self) -> list[str]:
        return [message.op for message in self.log]

    def stop(self) -> None:
        self.call(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tierkv-") as name:
        yield Path(name)


@pytest.fixture
def agent(home: Path) -> Iterator[Agent]:
    running = Agent(home / "run" / "s.sock")
    yield running
    running.stop()


@pytest.fixture
def client(agent: Agent) -> Iterator[HandoffClient]:
    made = HandoffClient(agent.path, "test", "test 1")
    assert made.wait_available(10)
    yield made
    made.close()


def wait_for(check, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def sends_state(
    position: int, rows_in_piece: int = 3, ends_at: int | None = None, scalars: dict | None = None
) -> Handler:
    """Row i of the only rows layer is full of i; the state is full of 7."""

    async def restore(connection: Connection, message: Message) -> None:
        number = message.integer("id")
        first = message.integer("rows_from")
        await connection.send("plan", {"id": number, "position": position, "first_row": first}, LAYOUT.to_json())
        for begin in range(0, position, rows_in_piece):
            n = min(rows_in_piece, position - begin)
            offset = await connection.allocate(1024)
            region = connection.region(offset, 1024)
            (segment,) = segments_of([[0, 0, begin, 0, [1, 2, n, 4]]], LAYOUT, 1024)
            segment_view(segment, LAYOUT, region)[:] = np.arange(begin, begin + n, dtype=np.float32)[
                None, None, :, None
            ]
            await connection.send("piece", {"id": number, "offset": offset, "bytes": 1024, "segments": [segment]})
        offset = await connection.allocate(64)
        (segment,) = segments_of([[1, 0, position, 0, [1, 8]]], LAYOUT, 64)
        segment_view(segment, LAYOUT, connection.region(offset, 64))[:] = 7
        await connection.send("piece", {"id": number, "offset": offset, "bytes": 64, "segments": [segment]})
        body = {"id": number, "position": ends_at or position, "scalars": scalars or {"1": {"x": 1}}}
        await connection.send("done", {**body, "fidelity": 20, "codec": "int8", "bytes": 99})

    return restore


def restore_of(client: HandoffClient, **options):
    model = client.announce(MODEL)
    return client.restore(model, list(range(50)), **{"limit": 49, "budget_s": 5.0, **options})


def test_hello_brings_settings_and_the_arena(agent: Agent, client: HandoffClient):
    assert client.settings["min_store_tokens"] == 5
    assert client.settings["demote"] == "ahead"
    assert client.node == "n"
    assert agent.path.stat().st_mode & 0o777 == 0o600
    assert agent.path.parent.stat().st_mode & 0o777 == 0o700
    assert {connection.engine_id for connection in agent.connections} == {agent.connections[0].engine_id}


def test_pieces_become_fresh_contiguous_arrays(agent: Agent, client: HandoffClient):
    agent.on["restore"] = sends_state(40)
    got = restore_of(client)
    assert isinstance(got, Restored)
    assert (got.position, got.first_row, got.fidelity, got.codec, got.bytes_moved) == (40, 0, 20, "int8", 99)
    assert got.scalars == {1: {"x": 1}}
    assert got.arrays.keys() == {(0, 0), (1, 0)}
    rows, state = got.arrays[0, 0], got.arrays[1, 0]
    assert rows.shape == (1, 2, 40, 4)
    assert rows.flags.c_contiguous
    assert (rows == np.arange(40, dtype=np.float32)[None, None, :, None]).all()
    assert state.dtype == np.uint16
    assert (state == 7).all()


def test_rows_before_the_first_wanted_are_cut_off(agent: Agent, client: HandoffClient):
    agent.on["restore"] = sends_state(40)
    got = restore_of(client, have=10)
    assert got.first_row == 10
    assert got.arrays[0, 0][0, 0, :, 0].tolist() == list(range(10, 40))


def test_a_restore_may_end_earlier_than_planned(agent: Agent, client: HandoffClient):
    agent.on["restore"] = sends_state(40, ends_at=21)
    got = restore_of(client)
    assert got.position == 21
    assert got.arrays[0, 0].flags.c_contiguous
    assert got.arrays[0, 0][0, 1, :, 3].tolist() == list(range(21))


def test_more_bytes_than_the_arena_flow_through_it(agent: Agent, client: HandoffClient):
    agent.on["restore"] = sends_state(3 * 4000)
    model = client.announce(MODEL)
    for _ in range(2):
        got = client.restore(model, list(range(13_000)), limit=12_999, budget_s=30.0)
        assert got.arrays[0, 0][0, 0, -1, 0] == 11_999
    wait_for(lambda: all(connection.regions.used_bytes == 0 for connection in agent.connections))


def test_an_array_that_does_not_come_is_an_error(agent: Agent, client: HandoffClient):
    async def restore(connection: Connection, message: Message) -> None:
        number = message.integer("id")
        await connection.send("plan", {"id": number, "position": 5, "first_row": 0}, LAYOUT.to_json())
        await connection.send(
            "done", {"id": number, "position": 5, "scalars": {}, "fidelity": 0, "codec": "", "bytes": 0}
        )

    agent.on["restore"] = restore
    assert restore_of(client) == NotRestored("no_agent")
    assert "did not come" in client.last_error


@pytest.mark.parametrize(
    ("op", "body"),
    [
        ("plan", {"position": -1, "first_row": 0}),
        ("plan", {"position": 5, "first_row": 9}),
        ("piece", {"offset": 0, "bytes": 1 << 40, "segments": []}),
        ("done", {"position": 5}),
        ("offer", {}),
        ("hello", {}),
    ],
)
def test_an_agent_that_speaks_nonsense_is_left(agent: Agent, client: HandoffClient, op: str, body: dict):
    async def restore(connection: Connection, message: Message) -> None:
        number = message.integer("id")
        if op != "plan":
            await connection.send("plan", {"id": number, "position": 5, "first_row": 0}, LAYOUT.to_json())
        await connection.send(op, {"id": number, **body}, LAYOUT.to_json() if op == "plan" else b"")

    agent.on["restore"] = restore
    assert isinstance(restore_of(client), NotRestored)
    assert client.wait_available(10), "it connects again"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"transfer": -1, "reason": ""},
        {"transfer": 1, "rows_from": 7, "reason": ""},
        {"transfer": 1, "rows_from": 512, "reason": ""},
        {"transfer": 1, "rows_from": 1 << 63, "reason": ""},
        {"transfer": 1, "rows_from": True, "reason": ""},
        {"transfer": 1, "rows_from": 0, "reason": True},
    ],
)
def test_an_offer_answered_with_nonsense_is_no_offer(agent: Agent, client: HandoffClient, body: dict):
    async def offer(connection: Connection, message: Message) -> None:
        await connection.send("offer", {"id": message.integer("id"), **body})

    agent.on["offer"] = offer
    model = client.announce(ModelAnnouncement("m", (), "{}"))
    assert client.offer(model, np.arange(300), 300, LAYOUT, budget_s=5.0) is None
    assert client.last_error


def test_a_budget_is_kept_and_the_connection_given_up(agent: Agent, client: HandoffClient):
    began = time.monotonic()
    assert restore_of(client, budget_s=0.2) == NotRestored("timed_out")
    assert time.monotonic() - began < 1.0
    assert client.wait_available(10)
    agent.on["restore"] = sends_state(10)
    assert isinstance(restore_of(client), Restored)


def test_reasons_are_passed_on(agent: Agent, client: HandoffClient):
    async def restore(connection: Connection, message: Message) -> None:
        await connection.send("none", {"id": message.integer("id"), "reason": "never_stored"})

    agent.on["restore"] = restore
    assert restore_of(client) == NotRestored("never_stored")


def test_a_late_answer_is_not_taken_for_the_next_one(agent: Agent, client: HandoffClient):
    async def late(connection: Connection, message: Message) -> None:
        number = message.integer("id")
        if len([each for each in agent.log if each.op == "offer"]) == 1:
            await asyncio.sleep(0.3)
        body = {"id": number, "transfer": number, "rows_from": 0, "window": False, "state": True, "reason": ""}
        await connection.send("offer", body)

    agent.on["offer"] = late
    model = client.announce(MODEL)
    assert client.offer(model, range(300), 300, LAYOUT, budget_s=0.1) is None
    second = client.offer(model, range(300), 300, LAYOUT, budget_s=5.0)
    assert second is not None
    assert (second.rows_from, second.window, second.state, second.position) == (0, False, True, 300)
    client.report_hot({})
    wait_for(lambda: "dropped" in agent.ops())
    (dropped,) = [message for message in agent.log if message.op == "dropped"]
    assert dropped.integer("transfer") != second.transfer_id


def test_models_are_announced_again_to_the_next_agent(home: Path):
    path = home / "s.sock"
    first = Agent(path)
    client = HandoffClient(path, "test", "test 1")
    model = client.announce(MODEL)
    model.fidelity = 30
    wait_for(lambda: "announce" in first.ops())
    first.stop()
    wait_for(lambda: not client.available)
    assert client.restore(model, range(50), limit=49, budget_s=1.0) == NotRestored("no_agent")
    second = Agent(path)
    assert client.wait_available(15)
    wait_for(lambda: "announce" in second.ops())
    (announced,) = [message for message in second.log if message.op == "announce"]
    assert announced.integer("fidelity") == 30
    client.close()
    second.stop()


def test_hits_are_told_by_the_movers_thread(agent: Agent, client: HandoffClient):
    model = client.announce(MODEL)
    client.hit(model, range(100_000), 90_000)
    client.report_hot({"entries": 3})
    wait_for(lambda: "report" in agent.ops())
    (hit,) = [message for message in agent.log if message.op == "hit"]
    assert (hit.integer("position"), len(hit.tokens())) == (90_000, 90_000)


def test_the_answer_to_a_report_refreshes_settings_and_models(agent: Agent, client: HandoffClient):
    async def report(connection: Connection, message: Message) -> None:
        await connection.send("settings", {"settings": {"memory_threshold": 0.8}, "models": {"0": "ready"}})

    agent.on["report"] = report
    model = client.announce(MODEL)
    wait_for(lambda: (client.report_hot({}), model.state == "ready")[1])
    assert client.settings["memory_threshold"] == 0.8


@pytest.mark.parametrize(
    "told",
    [
        None, 7, [], {"0": None}, {"0": [1.0]}, {"0": [1.0, 2.0, 3.0]}, {"0": ["1", 2.0]}, {"0": [-1.0, 0.0]},
        {"0": [1e9, 0.0]}, {"1": [1.0, 0.0]},
    ],
)  # fmt: skip
def test_a_cost_of_computing_that_cannot_be_true_is_not_believed(agent: Agent, client: HandoffClient, told: object):
    answers = [{"0": [0.001, 2e-6]}, told]

    async def report(connection: Connection, message: Message) -> None:
        costs = answers.pop(0) if answers else {}
        state = "ready" if answers else "again"
        await connection.send("settings", {"settings": {}, "models": {"0": state}, "prefill": costs})

    agent.on["report"] = report
    model = client.announce(MODEL)
    assert model.computing_s(0, 1000) == 0.0
    wait_for(lambda: (client.report_hot({}), model.state == "again")[1])
    # 1,000 tokens of 1 ms, and 1,000^2 / 2 pairs of 2 us.
    assert model.computing_s(0, 1000) == pytest.approx(1.0 + 1.0)
    assert model.computing_s(1000, 2000) == pytest.approx(1.0 + 3.0)


def test_the_arena_of_a_closed_connection_is_gone(agent: Agent):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        client = HandoffClient(agent.path, "test", "test 1")
        assert client.wait_available(10)
        client.close()
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)


def test_too_little_shared_memory_is_said(home: Path, monkeypatch: pytest.MonkeyPatch):
    agent = Agent(home / "s.sock")

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    client = HandoffClient(agent.path, "test", "test 1")
    assert not client.wait_available(0.5)
    assert "no_shared_memory" in client.last_error
    monkeypatch.undo()
    assert client.wait_available(10)
    client.close()
    agent.stop()


def test_another_version_is_refused_with_a_reason(agent: Agent):
    hello = {"channel": "control", "engine": "e", "build": "b", "engine_id": "x", "version": 99}
    with pytest.raises(HandoffError, match="other_version"):
        Channel.open(agent.path, hello, writable=False, budget_s=5.0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory files and /proc")
@pytest.mark.parametrize("arena_bytes", [-5, "much", None, 1 << 40])
def test_a_greeting_that_cannot_be_leaves_no_descriptor_open(home: Path, arena_bytes: object):
    path = home / "odd.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    stranger = os.memfd_create("odd-arena", os.MFD_CLOEXEC)
    body = {"version": VERSION, "arena_bytes": arena_bytes, "settings": {}, "node": "odd"}

    def greet() -> None:
        sock, _ = listener.accept()
        with sock:
            socket.send_fds(sock, [pack("hello", body)], [stranger])
            sock.recv(1 << 16)

    talking = threading.Thread(target=greet)
    talking.start()
    hello = {"channel": "control", "engine": "e", "build": "b", "engine_id": "x"}
    with pytest.raises(HandoffError):
        Channel.open(path, hello, writable=False, budget_s=5.0)
    talking.join(10)
    listener.close()
    os.close(stranger)
    assert not [fd for fd in os.listdir("/proc/self/fd") if "odd-arena" in target_of(fd)]


def target_of(fd: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def test_a_file_at_the_sockets_place_is_left_alone(home: Path, agent: Agent):
    path = home / "notes.txt"
    path.write_text("mine")
    with pytest.raises(StartupError, match="is no socket"):
        agent.call(HandoffServer(path, agent, arena_bytes=4096, settings=dict).start())
    assert path.read_text() == "mine"


def test_a_second_server_on_the_socket_does_not_start(agent: Agent):
    with pytest.raises(StartupError, match="already listens"):
        agent.call(HandoffServer(agent.path, agent, arena_bytes=4096, settings=dict).start())
    assert agent.path.exists()


def test_a_server_that_lost_its_socket_does_not_take_the_next_ones(home: Path):
    path = home / "s.sock"
    first = Agent(path)
    path.unlink()
    second = Agent(path)
    first.stop()
    assert path.exists()
    second.stop()
    assert not path.exists()


# --- the mover -----------------------------------------------------------------------------------------


def offer_of(client: HandoffClient, **wanted) -> Offer:
    model = client.announce(MODEL)
    return Offer(1, model, **{"position": 600, "rows_from": 256, "window": False, "state": True, **wanted})


def rows(n: int) -> np.ndarray:
    """[1, 2, n, 4], not contiguous."""
    full = np.arange(1 * 2 * n * 8, dtype=np.float32).reshape(1, 2, n, 8)
    return full[..., ::2]


class Taken:
    """What a demote connection brought, put together."""

    def __init__(self, agent: Agent, hold: bool = False) -> None:
        self.rows: dict[int, np.ndarray] = {}
        self.state: np.ndarray | None = None
        self.held: list[tuple[Connection, int]] = []
        self.hold = hold
        agent.on["piece"] = self.piece

    async def piece(self, connection: Connection, message: Message) -> None:
        offset, length = message.integer("offset"), message.integer("bytes")
        region = connection.region(offset, length)
        for segment in segments_of(message.fields["segments"], LAYOUT, length):
            view = segment_view(segment, LAYOUT, region).copy()
            if segment.layer == 0:
                self.rows[segment.position] = view
            else:
                self.state = view
        if self.hold:
            self.held.append((connection, offset))
        else:
            await connection.send("free", {"offsets": [offset]})


def test_rows_are_cut_at_multiples_of_256(agent: Agent, client: HandoffClient):
    taken = Taken(agent)
    mover = Mover(client)
    array = rows(344)
    state = np.arange(8, dtype=np.uint16).reshape(1, 8)
    assert mover.submit(Transfer(offer_of(client), LAYOUT, {(0, 0): array}, {(1, 0): state}, {1: {"offset": 600}}))
    assert mover.drain(10)
    wait_for(lambda: "end" in agent.ops())
    assert sorted(taken.rows) == [256, 512]
    np.testing.assert_array_equal(np.concatenate([taken.rows[256], taken.rows[512]], axis=2), array)
    np.testing.assert_array_equal(taken.state, state)
    begin = next(message for message in agent.log if message.op == "begin")
    assert begin.table("scalars") == {"1": {"offset": 600}}
    assert (mover.stats.moved, mover.stats.dropped, mover.pending_bytes) == (1, 0, 0)
    mover.close()


def test_regions_are_used_again_only_when_they_are_freed(agent: Agent, client: HandoffClient):
    taken = Taken(agent, hold=True)
    mover = Mover(client)
    array = rows(256 * 200)
    offer = offer_of(client, rows_from=0, position=256 * 200, state=False)
    mover.submit(Transfer(offer, LAYOUT, {(0, 0): array}))
    wait_for(lambda: len(taken.held) >= 3)
    time.sleep(0.2)
    assert not mover.drain(0.1), "the arena is full"
    seen = [offset for _, offset in taken.held]
    assert len(seen) == len(set(seen))
    taken.hold = False
    for connection, offset in list(taken.held):
        agent.call(connection.send("free", {"offsets": [offset]}))
    assert mover.drain(10)
    wait_for(lambda: len(taken.rows) == 200)
    np.testing.assert_array_equal(np.concatenate([taken.rows[p] for p in sorted(taken.rows)], axis=2), array)
    mover.close()


@pytest.mark.parametrize("part", [1.0, 0.6])
def test_a_full_mover_says_so_at_once(agent: Agent, client: HandoffClient, part: float):
    """Full by what it moves, or by the buffers that this is most of."""
    taken = Taken(agent, hold=True)
    array = rows(256 * 200)
    buffer_bytes = int(array.nbytes / part)
    mover = Mover(client, pending_bytes_cap=2 * buffer_bytes - 1)
    offer = offer_of(client, rows_from=0, position=256 * 200, state=False)
    assert mover.submit(Transfer(offer, LAYOUT, {(0, 0): array}, shared_bytes=buffer_bytes))
    wait_for(lambda: taken.held)
    assert mover.pending_bytes == buffer_bytes
    assert not mover.submit(Transfer(offer, LAYOUT, {(0, 0): array}, shared_bytes=buffer_bytes))
    taken.hold = False
    for connection, offset in list(taken.held):
        agent.call(connection.send("free", {"offsets": [offset]}))
    assert mover.drain(10)
    client.report_hot({})
    wait_for(lambda: "dropped" in agent.ops())
    assert next(m for m in agent.log if m.op == "dropped").text("reason") == "mover_full"
    assert (mover.stats.moved, mover.stats.dropped, mover.pending_bytes) == (1, 1, 0)
    mover.close()


def test_what_waits_lets_go_of_large_buffers(agent: Agent, client: HandoffClient):
    """The last 200 of 51,200 tokens, twelve times: as wide as the buffers are, two would fill the mover."""
    taken = Taken(agent, hold=True)
    full, count = rows(256 * 200), 12
    mover = Mover(client, pending_bytes_cap=4 * full.nbytes)
    first = offer_of(client, rows_from=0, position=256 * 200, state=False)
    for _ in range(2):
        assert mover.submit(Transfer(first, LAYOUT, {(0, 0): full}, shared_bytes=full.nbytes))
    wait_for(lambda: taken.held)
    offer = offer_of(client, rows_from=256 * 200 - 200, position=256 * 200)
    state = np.arange(8, dtype=np.uint16).reshape(1, 8)
    gone = []
    for index in range(count):
        buffer = full + index
        gone.append(weakref.ref(buffer))
        part = Transfer(offer, LAYOUT, {(0, 0): buffer[:, :, -200:]}, {(1, 0): state}, shared_bytes=buffer.nbytes)
        assert mover.submit(part)
        del buffer, part
    wait_for(lambda: all(each() is None for each in gone))
    assert mover.pending_bytes == 2 * full.nbytes + count * (full[:, :, -200:].nbytes + state.nbytes)
    came: list[np.ndarray] = []

    class Listing(Taken):
        async def piece(self, connection: Connection, message: Message) -> None:
            await super().piece(connection, message)
            if 256 * 200 - 200 in self.rows:
                came.append(self.rows.pop(256 * 200 - 200))

    Listing(agent)
    for connection, offset in list(taken.held):
        agent.call(connection.send("free", {"offsets": [offset]}))
    assert mover.drain(10)
    assert (mover.stats.moved, mover.stats.dropped, mover.pending_bytes) == (2 + count, 0, 0)
    wait_for(lambda: len(came) == count)
    for index, part in enumerate(came):
        np.testing.assert_array_equal(part, full[:, :, -200:] + index)
    mover.close()


def test_one_that_cannot_be_made_small_waits_as_it_is(agent: Agent, client: HandoffClient, monkeypatch):
    """No memory for the copy: nothing is lost, and the thread goes on with the next."""
    taken = Taken(agent, hold=True)
    full, tried, made = rows(256 * 200), [], []
    shrink = Transfer.compacted

    def refusing(self: Transfer) -> Transfer:
        tried.append(1)
        if len(tried) == 1:
            raise MemoryError
        small = shrink(self)
        made.append(weakref.ref(small.rows[0, 0]))
        return small

    monkeypatch.setattr(Transfer, "compacted", refusing)
    mover = Mover(client, pending_bytes_cap=4 * full.nbytes)
    first = offer_of(client, rows_from=0, position=256 * 200, state=False)
    for _ in range(2):
        assert mover.submit(Transfer(first, LAYOUT, {(0, 0): full}, shared_bytes=full.nbytes))
    wait_for(lambda: taken.held)
    offer = offer_of(client, rows_from=256 * 200 - 200, position=256 * 200, state=False)
    part = full[:, :, -200:]
    for _ in range(2):
        assert mover.submit(Transfer(offer, LAYOUT, {(0, 0): part}, shared_bytes=full.nbytes))
    wait_for(lambda: mover.pending_bytes == 3 * full.nbytes + part.nbytes)
    assert len(tried) == 2
    taken.hold = False
    for connection, offset in list(taken.held):
        agent.call(connection.send("free", {"offsets": [offset]}))
    assert mover.drain(10)
    assert (mover.stats.moved, mover.stats.dropped) == (4, 0)
    wait_for(lambda: [each() for each in made] == [None])
    mover.close()


def test_one_transfer_is_taken_however_large(agent: Agent, client: HandoffClient):
    """The state of a long prompt of a large model is more than the mover may have waiting."""
    taken = Taken(agent)
    mover = Mover(client, pending_bytes_cap=1000)
    array = rows(256 * 8)
    offer = offer_of(client, rows_from=0, position=256 * 8, state=False)
    for _ in range(2):
        assert mover.submit(Transfer(offer, LAYOUT, {(0, 0): array}))
        assert mover.drain(10)
    wait_for(lambda: len(taken.rows) == 8)
    np.testing.assert_array_equal(np.concatenate([taken.rows[p] for p in sorted(taken.rows)], axis=2), array)
    mover.close()


def test_a_cancelled_transfer_stops(agent: Agent, client: HandoffClient):
    taken = Taken(agent, hold=True)
    mover = Mover(client)
    offer = offer_of(client, rows_from=0, position=256 * 200, state=False)
    mover.submit(Transfer(offer, LAYOUT, {(0, 0): rows(256 * 200)}))
    wait_for(lambda: taken.held)
    assert mover.cancel(1)
    taken.hold = False
    for connection, offset in list(taken.held):
        agent.call(connection.send("free", {"offsets": [offset]}))
    assert mover.drain(10)
    client.report_hot({})
    wait_for(lambda: "dropped" in agent.ops())
    assert "end" not in agent.ops()
    assert not mover.cancel(1)
    mover.close()


def test_a_wrong_dtype_ends_one_transfer_only(agent: Agent, client: HandoffClient):
    taken = Taken(agent)
    mover = Mover(client)
    offer = offer_of(client, rows_from=0, position=256, state=False)
    mover.submit(Transfer(offer, LAYOUT, {(0, 0): rows(256).astype(np.float64)}))
    mover.submit(Transfer(offer, LAYOUT, {(0, 0): rows(256)}))
    assert mover.drain(10)
    wait_for(lambda: taken.rows)
    assert (mover.stats.moved, mover.stats.dropped) == (1, 1)
    mover.close()


def test_an_array_larger_than_the_arena_is_dropped_with_a_reason(home: Path):
    agent = Agent(home / "s.sock", arena_bytes=64 << 10)
    client = HandoffClient(agent.path, "test", "test 1")
    assert client.wait_available(10)
    big = Layout((LayerLayout("state", "ArraysCache", (ArraySpec("0", "float32", (1 << 16,)),)),))
    mover = Mover(client)
    offer = offer_of(client, rows_from=None)
    mover.submit(Transfer(offer, big, {}, {(0, 0): np.zeros(1 << 16, np.float32)}))
    assert mover.drain(10)
    client.report_hot({})
    wait_for(lambda: "dropped" in agent.ops())
    assert next(m for m in agent.log if m.op == "dropped").text("reason") == "array_over_arena"
    mover.close()
    client.close()
    agent.stop()


def test_without_an_agent_nothing_waits(home: Path):
    client = HandoffClient(home / "nobody.sock", "test", "test 1", connect_budget_s=0.05)
    mover = Mover(client)
    began = time.monotonic()
    offer = offer_of(client, rows_from=0, position=256, state=False)
    for _ in range(20):
        mover.submit(Transfer(offer, LAYOUT, {(0, 0): rows(256)}))
    assert mover.drain(5)
    assert time.monotonic() - began < 2.0
    assert mover.stats.dropped == 20
    mover.close()
    client.close()
