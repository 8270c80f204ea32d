"""tierkv.toml: its model, where it is found, where each value came from, and edits that keep comments.

``load`` is the way in. Every fault of a configuration is reported at once (``errors.ConfigFaults``).
"""

from tierkv.config.load import Loaded, Origin, load, search_path
from tierkv.config.model import Config

__all__ = ["Config", "Loaded", "Origin", "load", "search_path"]
