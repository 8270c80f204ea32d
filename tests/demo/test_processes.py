import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tierkv.demo.processes import Child, ChildFailed, Children, DemoFailed, free_port, interruptible, uninterrupted
from tierkv.demo.watcher import Watcher
from tierkv.errors import Terminated

SLEEP = [sys.executable, "-c", "import time; print('asleep', flush=True); time.sleep(600)"]
# Ignores SIGTERM, and has a child of its own that ignores it too.
STUBBORN = [sys.executable, "-c", """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
print("up", flush=True)
time.sleep(600)
"""]  # fmt: skip
PARENT = """
import os, pathlib, sys, time
from tierkv.demo.processes import Child
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(Child("vault", sleep, os.environ, pathlib.Path(sys.argv[1])).pid, flush=True)
time.sleep(600)
"""
# As on a system without a parent-death signal; the child has a child of its own.
WATCHED_PARENT = """
import os, pathlib, sys, time
from tierkv.demo import processes
from tierkv.demo.watcher import Watcher
processes._LIBC = None
folder = pathlib.Path(sys.argv[1])
forks = [sys.executable, "-c", "import os, time; os.fork(); print('up', flush=True); time.sleep(600)"]
children = processes.Children(Watcher(folder))
child = children.start(lambda: processes.Child("vault", forks, os.environ, folder))
while child.tail().count("up") < 2:
    time.sleep(0.02)
print(child.pid, flush=True)
time.sleep(600)
"""


def child(command: list[str], folder: Path, name: str = "vault") -> Child:
    return Child(name, command, os.environ, folder)


def wait_for(text: str, made: Child) -> None:
    until = time.monotonic() + 20
    while text not in made.tail():
        assert time.monotonic() < until
        time.sleep(0.02)


def check_for_20_s(made: Child) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        made.check()
        time.sleep(0.02)


def interrupt_myself(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)


def test_ended_child_is_reported_with_its_code_and_last_lines(tmp_path: Path):
    script = "import sys; print('line one'); print('port\\x1b[31m taken', file=sys.stderr); sys.exit(7)"
    made = child([sys.executable, "-c", script], tmp_path)
    with pytest.raises(ChildFailed, match="the vault ended with exit code 7") as failed:
        check_for_20_s(made)
    assert "line one" in str(failed.value)
    assert "port [31m taken" in str(failed.value), "control characters do not reach the terminal"


def test_killed_child_is_reported_with_the_signal(tmp_path: Path):
    made = child(SLEEP, tmp_path)
    os.kill(made.pid, signal.SIGKILL)
    with pytest.raises(ChildFailed, match="SIGKILL"):
        check_for_20_s(made)


def test_stop_ends_a_stubborn_child_and_its_own_children(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tierkv.demo.processes._GRACE_S", 0.2)
    made = child(STUBBORN, tmp_path)
    wait_for("up", made)
    grandchildren = psutil.Process(made.pid).children()
    made.stop()
    assert len(grandchildren) == 1
    psutil.wait_procs(grandchildren, timeout=10)
    assert not psutil.pid_exists(made.pid)
    assert not any(process.is_running() and process.status() != "zombie" for process in grandchildren)


def test_children_are_stopped_the_last_first(tmp_path: Path):
    children, order = Children(), []

    class Recording(Child):
        def stop(self) -> None:
            order.append(self.name)
            super().stop()

    for name in ("vault", "agent", "engine"):
        children.start(lambda name=name: Recording(name, SLEEP, os.environ, tmp_path))
    children.stop()
    assert order == ["engine", "agent", "vault"]
    children.check()


def test_waiting_ends_at_once_when_another_child_dies(tmp_path: Path):
    children = Children()
    children.start(lambda: child([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, "agent"))
    waited_for = children.start(lambda: child(SLEEP, tmp_path))
    with pytest.raises(ChildFailed, match="the agent ended with exit code 3"):
        children.wait_until(lambda: False, waited_for, 60)
    children.stop()


def test_child_that_is_never_ready_is_named(tmp_path: Path):
    children = Children()
    made = children.start(lambda: child(SLEEP, tmp_path))
    with pytest.raises(ChildFailed, match="the vault is alive but was not ready within 0 s"):
        children.wait_until(lambda: False, made, 0.2)
    children.stop()


def test_port_is_free_and_not_one_that_others_are_given():
    port = free_port()
    assert port < 32768
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def test_port_that_is_taken_is_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        free = free_port()
        monkeypatch.setattr("tierkv.demo.processes.random.sample", lambda *_: [busy, free])
        assert free_port() == free
        monkeypatch.setattr("tierkv.demo.processes.random.sample", lambda *_: [busy])
        with pytest.raises(DemoFailed, match="no free TCP port"):
            free_port()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_interrupts_like_ctrl_c(number):
    before = signal.getsignal(number)
    with pytest.raises(Terminated) as ended, interruptible():
        interrupt_myself(number)
    assert ended.value.number == number
    assert signal.getsignal(number) is before


def test_second_ctrl_c_does_not_stop_the_cleaning_up():
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no parent-death signal")
def test_killed_parent_takes_its_children_with_it(tmp_path: Path):
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    orphan = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    assert psutil.wait_procs([orphan], timeout=10)[0] or orphan.status() == "zombie"


def test_watcher_ends_the_children_of_a_killed_parent_and_removes_its_folder(tmp_path: Path):
    folder = tmp_path / "home"
    folder.mkdir()
    parent = subprocess.Popen([sys.executable, "-c", WATCHED_PARENT, str(folder)], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    family = [child, *child.children()]
    assert len(family) == 2
    parent.kill()
    parent.wait()
    until = time.monotonic() + 30
    while folder.exists() or any(one.is_running() and one.status() != "zombie" for one in family):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_watcher_leaves_alone_what_has_ended(tmp_path: Path):
    watcher, other = Watcher(tmp_path / "none"), subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL)
    watcher.add(other.pid)
    watcher.discard(other.pid)
    watcher.close()
    assert other.poll() is None
    other.kill()
    other.wait()
