"""What each kind of process loads, asked of a process that has just done it."""

import subprocess
import sys

import pytest

HEAVY = {"textual", "numba", "mlx", "mlx_lm", "llvmlite", "torch", "transformers"}
NOT_IN_ENGINES = {"pydantic", "grpc", "google.protobuf", "numba", "blake3", "xxhash", "zstandard", "tomlkit", "textual"}


def loaded(statement: str) -> set[str]:
    """The modules of a fresh interpreter after ``statement``."""
    script = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "command", [["status", "--connect", "127.0.0.1:1"], ["version"], ["config", "path"], ["--help"]]
)
def test_light_commands_load_nothing_heavy(command: list[str], tmp_path):
    run = (
        "import contextlib, io, os\n"
        f"os.environ['TIERKV_HOME'] = {str(tmp_path)!r}; os.chdir({str(tmp_path)!r})\n"
        "from tierkv.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main({command!r})"
    )
    assert not loaded(run) & HEAVY


def test_vault_loads_neither_numba_nor_mlx():
    assert not loaded("import tierkv.agents.vault") & (HEAVY | {"rich"})


@pytest.mark.parametrize(
    "module", ["tierkv.hooks", "tierkv.handoff.client", "tierkv.handoff.mover", "tierkv.state.layout"]
)
def test_what_an_engine_imports_stays_light(module: str):
    assert not loaded(f"import {module}") & (NOT_IN_ENGINES | {"tierkv.identity", "tierkv.codec", "tierkv.rpc"})


def test_hook_of_mlx_lm_brings_nothing_of_its_own_into_the_engine():
    # mlx-lm's server imports transformers and what that wants; only what the hook adds is counted.
    without = loaded("import mlx.core, mlx_lm.server")
    added = loaded("import mlx.core, mlx_lm.server\nimport tierkv.hooks.mlx_lm") - without
    assert not added & NOT_IN_ENGINES
    assert {name.split(".")[1] for name in added if name.startswith("tierkv.")} <= {
        "errors", "handoff", "hooks", "paths", "state", "units",
    }  # fmt: skip


def test_inference_agent_loads_no_engine():
    assert not loaded("import tierkv.agents.inference") & {"mlx", "mlx_lm", "textual", "transformers"}
