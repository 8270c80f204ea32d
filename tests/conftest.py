"""What every test may count on, however pytest was started."""

import signal

import pytest

# A shell that puts a command in the background makes it ignore ctrl-c, and everything it starts after it. Tests that
# interrupt a program want it to hear that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take long (`make test ARGS=--durations=0`) come first, so that no worker is left with one at the end; those
# that wait for processes alternate with those that compute.
FIRST = (
    "test_inference_faults.py",
    "test_tui_work.py",
    "test_mlx_lm_concurrency.py",
    "test_mlx_cache.py",
    "test_faulty_vault.py",
    "test_tui_hostile.py",
    "test_mlx_lm_server.py",
    "test_mlx_protocols.py",
    "test_demo.py",
    "test_older_mlx_lm.py",
    "test_concurrency.py",
    "test_exo_cache.py",
    "test_held_regions.py",
    "test_tui_screens.py",
    "test_cli_mlx_lm.py",
    "test_cache_classes.py",
    "test_durable_vaults.py",
    "test_tui_golden.py",
    "test_mlx_lm_agents.py",
    "test_touch.py",
    "test_tui_tmux.py",
    "test_exo_runner.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(FIRST)))
