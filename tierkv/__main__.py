"""``python -m tierkv`` is ``tierkv``."""

from tierkv.cli.main import entry

entry()
