"""A real vault in a process of its own, to be stopped, frozen and killed; prints its port."""

import asyncio
import logging
import sys

from tierkv.agents.vault import VaultOptions, run_vault

logging.basicConfig(stream=sys.stderr)
port, max_bytes = int(sys.argv[1]), int(sys.argv[2])
asyncio.run(run_vault(VaultOptions("victim", port=port, max_bytes=max_bytes, ready_fd=1)))
