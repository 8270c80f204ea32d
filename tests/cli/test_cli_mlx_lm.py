"""``tierkv mlx-lm``: the server takes the command's place; an inference agent is beside it and ends with it.

A script stands in for the other Python, so that what is passed on can be seen; the real server has its own tests.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from cli_agents import config_file, program


@pytest.fixture
def python():
    """A program that takes the check for packages and then does what SERVER says."""

    def make(server: str, check: int = 0) -> str:
        path = Path("python")
        path.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then exit {check}; fi\n{server}\n')
        path.chmod(0o755)
        return str(path.absolute())

    return make


def test_arguments_and_exit_code_are_passed_on(python, home):
    ran = program(
        "mlx-lm", "--no-agent", "--python", python('echo "$@"; exit 7'), "--", "--model", "m", "--", "--port=1"
    )
    assert ran.code == 7
    place = home / "run" / "inference.sock"
    assert ran.out == f"-m tierkv.hooks.mlx_lm --tierkv-socket {place} -- --model m -- --port=1\n"
    assert ran.err == ""


def test_socket_of_the_configuration_is_used(python):
    Path("tierkv.toml").write_text("[inference]\nsocket = '/tmp/some.sock'\n")
    ran = program("mlx-lm", "--no-agent", "--python", python('echo "$4"'), "--", "--port=0")
    assert ran.out == "/tmp/some.sock\n"


def test_signals_reach_the_server(python):
    words = [
        sys.executable,
        "-m",
        "tierkv",
        "mlx-lm",
        "--no-agent",
        "--python",
        python("echo up; exec sleep 60"),
        "--",
        "--port=0",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
    process.stdout.close()


@pytest.fixture
def serving(python, home, run):
    """A server that sleeps, with a real agent beside it: (its process, what ``tierkv status`` says of the agent)."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    config_file(Path.cwd(), kv=1, ssm=2, inference=port, more="handoff_bytes = '4MiB'\n")
    words = [sys.executable, "-m", "tierkv", "mlx-lm", "--python", python("echo up; exec sleep 120"), "--", "--port=0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def agent():
        """Calls are answered before the kernels are compiled, engines after."""
        nodes = until(lambda: run("status", "--json").json["nodes"], lambda nodes: nodes[0]["reachable"])
        until((home / "run" / "inference.sock").exists, bool)
        return nodes[0]["node"]

    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process, agent
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_agent_is_started_beside_the_server_and_ends_with_it(run, serving, number):
    process, agent = serving
    node = agent()
    assert node["role"] == "inference"
    assert node["pid"] != process.pid
    process.send_signal(number)
    process.wait(10)
    until(lambda: run("status").code, lambda code: code == 3)
    until(lambda: alive(node["pid"]), lambda there: not there)
    told = process.communicate()[1]
    assert "started an inference agent beside the server" in told
    assert "Traceback" not in told


def test_agent_that_dies_is_started_again_and_one_that_is_frozen_ends_with_the_server(serving):
    process, agent = serving
    first = agent()["pid"]
    os.kill(first, signal.SIGKILL)
    until(lambda: alive(first), lambda there: not there)
    second = until(lambda: agent()["pid"], lambda pid: pid != first)
    os.kill(second, signal.SIGSTOP)
    process.kill()
    until(lambda: alive(second), lambda there: not there)
    told = process.communicate()[1]
    assert "tierkv: the inference agent was killed by SIGKILL; it is started again in 0.5 s\n" in told
    assert "Traceback" not in told


def alive(pid: int) -> bool:
    """The agent's parent is killed with it, so nobody may have waited for it: a zombie is gone, too."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(ask, enough, seconds=40):
    deadline = time.monotonic() + seconds
    while not enough(answer := ask()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    return answer


def test_agent_that_answers_is_used(python, home):
    place = home / "run" / "inference.sock"
    place.parent.mkdir(parents=True)
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(place))
        listening.listen()
        ran = program("mlx-lm", "--python", python("exit 0"), "--", "--port=0")
    assert (ran.code, ran.err) == (0, "")


def test_what_the_server_would_say_in_a_traceback_is_said_before_anything_starts(python):
    ran = program("mlx-lm", "--python", python("echo up"), "--", "--model", "/no/such/model", "--port=0")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "tierkv: --model /no/such/model: no such folder\n"
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        ran = program("mlx-lm", "--python", python("echo up"), "--", "--model", "a/b", "--port", str(port))
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"tierkv: 127.0.0.1:{port} is already in use")


def test_python_without_the_packages_and_no_python_at_all(run, python):
    ran = run("mlx-lm", "--no-agent", "--python", python("", check=1), "--", "--port=0")
    assert ran.code == 1
    assert "cannot import mlx, mlx_lm and tierkv" in ran.err
    ran = run("mlx-lm", "--no-agent", "--python", "/no/such/python", "--", "--port=0")
    assert ran.code == 2
    assert "no such program" in ran.err


@pytest.mark.parametrize(
    ("there", "absent"),
    [
        ((), "mlx and mlx_lm and tierkv"),
        (("mlx_lm", "tierkv"), "mlx"),
        (("mlx_lm", "tierkv", "mlx/lib"), "mlx"),
        (("mlx_lm", "tierkv", "mlx/core", "mlx/core/broken"), "mlx"),
        (("mlx/core", "tierkv"), "mlx_lm"),
        (("mlx/core", "mlx_lm"), "tierkv"),
    ],
)
def test_what_the_engines_python_does_not_have_is_named_before_anything_starts(run, there, absent):
    packages = Path("packages")
    for name in there:
        folder = packages / name
        folder.mkdir(parents=True, exist_ok=True)
        if name.endswith("broken"):
            (folder.parent / "__init__.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')")
        elif name != "mlx/lib":
            (folder / "__init__.py").touch()
    python = Path("python")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages.absolute()} exec {sys.executable} -S -P "$@"\n')
    python.chmod(0o755)
    ran = run("mlx-lm", "--python", str(python.absolute()), "--", "--port=0")
    assert ran.code == 1
    assert ran.err == (
        f"tierkv: {python.absolute()} cannot import {absent}: install it there (pip install 'tierkv[mlx]')\n"
    )


@pytest.mark.parametrize(("absent", "package"), [("mlx_lm", "mlx-lm"), ("mlx", "mlx"), ("mlx.core", "mlx")])
def test_each_package_of_the_engine_is_looked_for_here_too(run, monkeypatch, absent, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == absent else object())
    ran = run("mlx-lm", "--no-agent", "--", "--port=0")
    assert (ran.code, ran.err) == (1, f"tierkv: the package '{package}' is missing: pip install 'tierkv[mlx]'\n")


def test_missing_package_names_its_extra(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = run("mlx-lm", "--no-agent", "--", "--port=0")
    assert ran.code == 1
    assert "pip install 'tierkv[mlx]'" in ran.err


@pytest.mark.parametrize(("setting", "said"), [("TIERKV_TOKEN", "is not usable"), ("file", "cannot read the token")])
def test_a_token_that_cannot_be_used_is_said_before_anything_starts(python, monkeypatch, setting, said):
    if setting == "file":
        Path("tierkv.toml").write_text("[security]\ntoken_file = '/no/such/token'\n")
    else:
        monkeypatch.setenv(setting, "short")
    ran = program("mlx-lm", "--python", python("echo up"), "--", "--port=0")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("tierkv: ")
    assert said in ran.err
    assert ran.err.count("\n") == 1


def test_the_real_server_is_what_runs():
    ran = program("mlx-lm", "--no-agent", "--no-blas", "--", "--help", timeout=120)
    assert ran.code == 0
    assert "--prompt-cache-size" in ran.out


def test_a_server_that_cannot_start_ends_with_its_own_exit_code():
    ran = program("mlx-lm", "--no-agent", "--no-blas", "--", "--no-such-option", timeout=120)
    assert ran.code == 2
    assert "unrecognized arguments: --no-such-option" in ran.err
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        ran = program("mlx-lm", "--no-agent", "--no-blas", "--", "--port", port, timeout=120)
    assert ran.code == 1
    assert "already in use" in ran.err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux wheels of MLX link the reference BLAS")
def test_the_engine_has_a_fast_blas_unless_it_is_not_wanted(python, monkeypatch):
    """A Python of which nothing is known keeps its own BLAS; this one gets what the demonstration gets, and says so."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    ran = program("mlx-lm", "--no-agent", "--python", python('echo "preload=$LD_PRELOAD"'), "--", "--port=0")
    assert (ran.out, ran.err) == ("preload=\n", "")
    script = python('echo "preload=$LD_PRELOAD"')
    Path(script).write_text(f'#!/bin/sh\n[ $1 = -c ] && exec {sys.executable} "$@"\necho preload=$LD_PRELOAD\n')
    ran = program("mlx-lm", "--no-agent", "--python", script, "--", "--port=0", timeout=120)
    assert ran.out.endswith("libtierkv_openblas.so\n")
    assert ran.err == "tierkv: the engine multiplies float32 with OpenBLAS (--no-blas leaves it its own)\n"
    ran = program("mlx-lm", "--no-agent", "--no-blas", "--python", script, "--", "--port=0")
    assert (ran.out, ran.err) == ("preload=\n", "")
