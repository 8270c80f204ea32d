"""What all commands share: help, --config anywhere, exit codes, one message and no traceback, light imports."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_agents import program

from tierkv.cli import main as main_module
from tierkv.cli import version
from tierkv.cli.main import build_parser, main, parse
from tierkv.errors import BadFrame, StoreFull, Terminated, Unreachable

COMMANDS = (
    "agent", "vault", "mlx-lm", "status", "events", "prefixes", "pin", "unpin", "purge", "token", "config", "bench",
    "demo", "tui", "version",
)  # fmt: skip


def test_alone_it_shows_help_and_exits_with_2(run):
    ran = run()
    assert (ran.code, ran.out) == (2, "")
    assert "first steps on one machine" in ran.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    ran = run(command, "--help")
    assert ran.code == 0
    assert f"usage: tierkv {command}" in ran.out
    assert "--config FILE" in ran.out


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("version",)])
def test_help_teaches_with_an_example(run, command):
    assert "example:" in run(command, "--help").out


def test_help_lists_every_command(run):
    out = run("--help").out
    assert all(f"\n    {command}" in out for command in COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["statsu"], "'statsu' is not one of agent, vault"),
        (["statsu"], "did you mean 'status'?"),
        (["mlx-lm", "--model", "m"], "the rest follows --: tierkv mlx-lm -- --model ..."),
        (["status", "--jsn"], "unknown argument: --jsn; did you mean --json?"),
        (["config", "show", "--jsn"], "tierkv config show: unknown argument: --jsn; did you mean --json?"),
        (["status", "--confg=x"], "did you mean --config?"),
        (["--verson", "status"], "did you mean --version?"),
        (["config", "shwo"], "did you mean 'show'?"),
        (["status", "--", "x"], "nothing may follow -- here"),
        (["status", "--connect"], "expected one argument"),
        (["config"], "usage: tierkv config"),
        (["agent"], "which role?"),
        (["agent", "--role", "vualt"], "there is no role 'vualt'"),
        (["agent", "--role", "kv-vualt"], "did you mean 'kv-vault'?"),
        (["agent", "--role", "recompute"], "the recompute role is not part of this version"),
        (["agent", "--role", "inference", "--max-bytes", "1GiB"], "--max-bytes is for vaults"),
        (["agent", "--role", "kv-vault", "--socket", "x"], "are for --role inference"),
        (["vault", "--port", "99999"], "--port: vault.port = 99999: must be from 0 to 65535"),
        (["vault", "--max-bytes", "much"], "--max-bytes: vault.max_bytes = 'much': is not a size"),
        (["status", "--connect", "nas"], "'nas' is not an address; write host:port"),
        (["status", "--connect", "nas:0"], "is not an address"),
        (["purge"], "say what: --model, --prefix"),
        (["purge", "--all", "--model", "x"], "--all goes alone"),
        (["purge", "--prefix", "xyz"], "is not a key"),
        (["purge", "--prefix", "abcd"], "its start at least 8"),
        (["purge", "--older-than", "soon"], "'soon' is not a duration"),
        (["purge", "--all"], "add --yes, or look first with --dry-run"),
        (["prefixes", "--limit", "0"], "--limit must be from 1"),
        (["mlx-lm"], "give mlx_lm.server's arguments after --"),
        (["bench", "nothing-of-this-name"], "benchmark"),
        (["tui"], "terminal"),
    ],
)  # fmt: skip
def test_misuse_is_one_message_and_exit_code_2(run, words, message):
    ran = run(*words)
    assert ran.code == 2
    assert ran.out == ""
    assert message in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("words", [["token", "show", "--json"], ["version", "--dry-run"], ["config", "path", "--host"]])
def test_an_option_of_another_command_is_not_suggested(run, words):
    ran = run(*words)
    assert ran.code == 2
    command = " ".join(words[:-1])
    assert ran.err == f"tierkv {command}: unknown argument: {words[-1]}\nTry 'tierkv {command} --help'.\n"


@pytest.mark.parametrize(
    "words",
    [["--config", "c.toml", "config", "path"], ["config", "path", "--config", "c.toml"],
     ["config", "--config", "c.toml", "path"], ["config", "path", "--config=c.toml"]],
    ids=" ".join,
)  # fmt: skip
def test_config_is_accepted_anywhere(run, words):
    with open("c.toml", "w") as file:
        file.write("")
    ran = run(*words)
    assert (ran.code, ran.out.strip()) == (0, os.path.abspath("c.toml"))


def test_what_follows_two_dashes_is_passed_on_untouched():
    arguments = parse(["mlx-lm", "--no-agent", "--", "--model", "m", "--", "--config", "x"])
    assert arguments.rest == ["--model", "m", "--", "--config", "x"]
    assert arguments.config is None


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Unreachable("nas:1", "not reachable"), 3, "tierkv: nas:1: not reachable"),
        (StoreFull(5, 3), 5, "tierkv: no room for 5 bytes"),
        (BadFrame("magic", "damaged"), 1, "tierkv: damaged"),
        (KeyboardInterrupt(), 130, "tierkv: interrupted"),
        (Terminated(15), 143, "tierkv: terminated"),
        (BrokenPipeError(), 0, ""),
        (ImportError("No module named 'numba'", name="numba"), 1, "pip install 'tierkv[agent]'"),
        (ZeroDivisionError("division\nby zero"), 1, "ZeroDivisionError: division by zero"),
        (OSError(errno.EIO, "Input/output error"), 1, "this is a fault of TierKV"),
    ],
)
def test_errors_become_one_message_and_an_exit_code(monkeypatch, capfd, error, code, message):
    def fail(_):
        raise error

    monkeypatch.setattr(version, "_version", fail)
    monkeypatch.setattr(main_module, "discard_output", lambda: None)
    assert main(["version"]) == code
    told = capfd.readouterr()
    assert told.out == ""
    assert message in told.err
    assert "Traceback" not in told.err


@pytest.mark.parametrize("make", ["missing folder", "a file for a folder", "a folder for a file", "name too long"])
def test_a_path_that_cannot_be_used_is_named_and_is_no_fault_of_tierkv(run, tmp_path, make):
    (tmp_path / "file").touch()
    path, why = {
        "missing folder": (tmp_path / "none" / "talk.tkx", "No such file or directory"),
        "a file for a folder": (tmp_path / "file" / "talk.tkx", "Not a directory"),
        "a folder for a file": (tmp_path, "Is a directory"),
        "name too long": (tmp_path / ("n" * 300), "File name too long"),
    }[make]
    ran = run("vault", "export", str(path), "--all", "--connect", "127.0.0.1:1")
    if make == "a folder for a file":  # seen before any vault is asked
        assert (ran.code, ran.out, ran.err) == (2, "", f"tierkv: {path} is a folder: name a file in it\n")
    else:
        assert (ran.code, ran.out, ran.err) == (1, "", f"tierkv: {path}: {why}\n")


def test_debugging_shows_the_traceback(monkeypatch, capsys):
    def fail(_):
        raise ZeroDivisionError

    monkeypatch.setattr(version, "_version", fail)
    monkeypatch.setenv("TIERKV_DEBUG", "1")
    assert main(["version"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error():
    words = f"{sys.executable} -m tierkv config schema | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {words}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "cluster.name  [live]\n"


# --- light imports -------------------------------------------------------------------------------

_HEAVY = """
import sys
from tierkv.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("HEAVY", [name for name in ("textual", "rich", "numba", "mlx", "mlx_lm") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words",
    [["--help"], ["status"], ["status", "--json"], ["events"], ["config", "show", "--origin"], ["config", "validate"],
     ["config", "schema"], ["version"], ["token", "path"], ["purge", "--all", "--dry-run"], ["prefixes"],
     ["demo", "--help"], ["tui", "--help"], ["agent", "--help"]],
    ids=" ".join,
)  # fmt: skip
def test_light_commands_import_nothing_heavy(words):
    done = subprocess.run(
        [sys.executable, "-c", _HEAVY, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert "HEAVY []" in done.stderr, done.stderr


def test_help_does_not_even_import_grpc_or_pydantic():
    check = _HEAVY.replace("'textual'", "'grpc', 'pydantic', 'tomlkit', 'numpy'")
    done = subprocess.run([sys.executable, "-c", check, "--help"], capture_output=True, text=True, check=False)
    assert "HEAVY []" in done.stderr, done.stderr


def test_all_subparsers_share_the_habits():
    build_parser().parse_args(["version"])


# --- version, token, bench -----------------------------------------------------------------------


def test_version_reads_metadata(run):
    from importlib.metadata import version as installed

    found = run("version", "--json").json
    assert found["schema"] == "tierkv.version/1"
    assert found["packages"]["grpcio"] == installed("grpcio")
    assert run("version").out.startswith("tierkv    ")
    assert run("--version").out.startswith("tierkv ")


def test_version_names_what_is_not_installed(run, monkeypatch):
    monkeypatch.setattr(version, "PACKAGES", ("no-such-package-here",))
    assert run("version", "--json").json["packages"] == {"no-such-package-here": None}
    assert "not installed" in run("version").out


def test_token_is_made_private_shown_and_not_overwritten(run, home):
    assert run("token", "show").code == 1
    missing = run("token", "path")
    assert (missing.code, missing.out.strip()) == (0, str(home / "token"))
    assert "there is no token yet" in missing.err
    made = run("token", "new")
    assert (made.code, made.out.strip()) == (0, str(home / "token"))
    assert (home / "token").stat().st_mode & 0o777 == 0o600
    first = run("token", "show").out.strip()
    assert len(first) >= 32
    assert first not in made.out + made.err
    again = run("token", "new")
    assert again.code == 5
    assert "--replace" in again.err
    assert run("token", "show").out.strip() == first
    assert run("token", "new", "--replace").code == 0
    assert run("token", "show").out.strip() != first


def test_token_hint_names_a_path_that_is_good_everywhere(run):
    made = run("token", "new", "--file", "shared")
    assert made.out.strip() == os.path.abspath("shared")
    assert f'token_file = "{os.path.abspath("shared")}"' in made.err


def test_token_given_on_purpose_is_found_by_file_and_by_environment(run, home, monkeypatch, tmp_path):
    shared = tmp_path / "etc" / "token"
    assert run("token", "new", "--file", str(shared)).code == 0
    with open("tierkv.toml", "w") as file:
        file.write(f"[security]\ntoken_file = '{shared}'\n")
    found = run("token", "path", "--json").json
    assert (found["source"], found["explicit"], found["exists"]) == (str(shared), True, True)
    monkeypatch.setenv("TIERKV_TOKEN", "a-token-from-the-environment")
    assert run("token", "show").out.strip() == "a-token-from-the-environment"
    monkeypatch.setenv("TIERKV_TOKEN", "short")
    ran = run("token", "show")
    assert ran.code == 2
    assert "it needs 16 or more" in ran.err


def test_bench_lists_runs_and_passes_on(run, monkeypatch, tmp_path):
    from tierkv.cli import bench

    monkeypatch.setattr(bench, "_ROOT", tmp_path)
    assert "come with the source" in run("bench").err
    (tmp_path / "codec.py").write_text("import sys; sys.exit(len(sys.argv))")
    assert run("bench").out == "codec\n"
    assert run("bench", "codec", "--", "a", "b").code == 3


_INTERRUPTED = """
import os, signal, time
from tierkv.cli import main, version
version._version = lambda _: os.kill(os.getpid(), signal.SIGINT) or time.sleep(9)
main.entry()
"""


def test_interrupted_command_exits_with_130():
    words = [sys.executable, "-c", _INTERRUPTED, "version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tierkv: interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_output_that_cannot_be_written_is_not_a_fault_of_tierkv():
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "tierkv", "config", "schema"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "tierkv: cannot write: No space left on device\n")


def test_module_and_script_are_the_same():
    assert program("version").out.startswith("tierkv    ")
