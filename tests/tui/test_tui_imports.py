"""Opening the console loads neither an engine nor an agent, and the screens alone need no gRPC."""

import subprocess
import sys


def loaded(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_the_console_needs_no_engine_and_no_agent() -> None:
    modules = loaded("import tierkv.tui.app, tierkv.tui.live, tierkv.tui.screenshot")
    assert not modules & {"numba", "mlx", "mlx_lm", "pydantic"}
    assert not {name for name in modules if name.startswith("tierkv.agents")}


def test_the_first_data_needs_no_numpy() -> None:
    assert "numpy" not in loaded("import tierkv.cli.tui, tierkv.tui.app, tierkv.tui.live, tierkv.tui.live_operator")


def test_the_screens_need_no_grpc() -> None:
    assert not loaded("import tierkv.tui.app, tierkv.tui.screenshot") & {"grpc", "google.protobuf", "numpy"}
