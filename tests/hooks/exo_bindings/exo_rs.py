"""A stand-in for EXO's Rust bindings: its publish and subscribe between the nodes named in EXO_RS_PEERS, over TCP.

What EXO's router sees is as with the real one: messages of other nodes on topics that this node subscribes to, in the
order in which each sender sent them, and a Connection for each peer that comes or goes. No discovery.
"""

import asyncio
import fcntl
import os
from dataclasses import dataclass


class FromSwarm:
    pass


@dataclass(frozen=True)
class Connection(FromSwarm):
    connected: bool


@dataclass(frozen=True)
class Message(FromSwarm):
    topic: str
    data: bytes


FromSwarm.Connection, FromSwarm.Message = Connection, Message


class NetworkingHandle:
    @staticmethod
    def new(identity, namespace, listen_port, discovery_service_port):
        return NetworkingHandle(listen_port)

    def __init__(self, port):
        self._port = port
        self._topics = set()
        self._arrived = None
        self._peers = {}
        self._tasks = []

    async def _start(self):
        if self._arrived is None:
            self._arrived = asyncio.Queue()
            self._server = await asyncio.start_server(self._serve, "0.0.0.0", self._port)
            for peer in filter(None, os.environ.get("EXO_RS_PEERS", "").split(",")):
                self._tasks.append(asyncio.create_task(self._dial(peer)))

    async def _dial(self, peer):
        host, _, port = peer.rpartition(":")
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(0.3)
                continue
            self._peers[peer] = writer
            self._arrived.put_nowait(Connection(True))
            try:
                await reader.read()
            except OSError:
                pass
            self._peers.pop(peer, None)
            writer.close()
            self._arrived.put_nowait(Connection(False))

    async def _serve(self, reader, writer):
        try:
            while True:
                topic, data = [await reader.readexactly(int.from_bytes(await reader.readexactly(4))) for _ in range(2)]
                if topic.decode() in self._topics:
                    self._arrived.put_nowait(Message(topic.decode(), data))
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    async def recv(self):
        await self._start()
        return await self._arrived.get()

    async def gossipsub_subscribe(self, topic):
        await self._start()
        known = topic in self._topics
        self._topics.add(topic)
        return not known

    async def gossipsub_unsubscribe(self, topic):
        known = topic in self._topics
        self._topics.discard(topic)
        return known

    async def gossipsub_publish(self, topic, data):
        if topic not in self._topics:
            return
        name = topic.encode()
        for writer in list(self._peers.values()):
            writer.write(len(name).to_bytes(4) + name + len(data).to_bytes(4) + data)


class PidfileError(Exception):
    pass


class Pidfile:
    def __init__(self, path, mode):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._path, self._file = path, os.open(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PidfileError("already running") from error

    def write(self):
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def as_raw_fd(self):
        return self._file

    def close(self):
        os.unlink(self._path)
        os.close(self._file)
