"""The vault inside an inference agent: with a folder it outlives the agent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from agent_processes import Cluster, assert_state, hybrid_layout, prompt

from tierkv.handoff.client import NotRestored


@pytest.mark.parametrize("durable", [True, False])
def test_a_killed_agent_restores_from_its_own_folder_when_it_is_back(
    cluster: Cluster, tmp_path: Path, durable: bool
) -> None:
    folder = {"local_vault_path": str(tmp_path / "vault")} if durable else {}
    agent = cluster.agent(local_vault_bytes=64 << 20, **folder)
    chat = prompt(600)
    first = cluster.engine(layout=hybrid_layout()).ready()
    first.demote(chat)
    cluster.close_engines()
    agent.kill()
    again = cluster.agent(local_vault_bytes=64 << 20, **folder)
    second = cluster.engine(layout=hybrid_layout()).ready()
    got = second.restore(np.append(chat, 7))
    if durable:
        assert_state(got, second.layout, chat, 600)
        assert again.tier("local").cap_bytes == 64 << 20
        files = {path.name for path in Path(folder["local_vault_path"]).iterdir()}
        assert {"vault.meta", "vault.lock", "00000001.seg"} <= files
    else:
        assert isinstance(got, NotRestored)
