"""Where TierKV keeps its files for one user; every place can be moved by an environment variable."""

from __future__ import annotations

import os
from pathlib import Path


def config_dir() -> Path:
    """``$TIERKV_HOME``, else ``$XDG_CONFIG_HOME/tierkv``, else ``~/.config/tierkv``."""
    home = os.environ.get("TIERKV_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "tierkv"


def cache_dir() -> Path:
    """Rebuildable files: ``$TIERKV_HOME/cache``, else ``$XDG_CACHE_HOME/tierkv``, else ``~/.cache/tierkv``."""
    home = os.environ.get("TIERKV_HOME")
    if home:
        return Path(home) / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierkv"


def token_path() -> Path:
    """The shared token of this user's agents and tools, mode 0600."""
    return config_dir() / "token"


def runtime_dir() -> Path:
    """Sockets: ``$TIERKV_HOME/run``, else ``$XDG_RUNTIME_DIR/tierkv``, else ``~/.cache/tierkv/run``."""
    home = os.environ.get("TIERKV_HOME")
    if home:
        return Path(home) / "run"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "tierkv" if runtime else cache_dir() / "run"


def handoff_socket() -> Path:
    """The Unix socket between an engine's hook and the inference agent; ``$TIERKV_SOCKET`` wins."""
    named = os.environ.get("TIERKV_SOCKET")
    return Path(named) if named else runtime_dir() / "inference.sock"
