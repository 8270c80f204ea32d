"""``tierkv record`` and ``tierkv top --once`` on a real vault."""

from pathlib import Path

from cli_agents import config_file

from tierkv.errors import EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from tierkv.telemetry.recording import read_recording


def test_a_recording_of_a_real_vault_can_be_read_again(run, vault, tmp_path: Path) -> None:
    config_file(Path.cwd(), kv=vault.port, more="tenant = 'acme'\n")
    vault.store(model="SmolLM2", blocks=2)
    ran = run("record", "night.ndjson", "--for", "2s")
    assert ran.code == EXIT_OK, ran.err
    assert "snapshots" in ran.err
    header, steps = read_recording(Path("night.ndjson"))
    assert header.cluster == "test"
    assert "inference.tenant" not in header.config
    names = {step.snapshot.name for step in steps if step.snapshot}
    assert names == {"nas"}
    assert any(event.kind == "start" for step in steps for event in step.events)


def test_top_once_prints_the_first_screen(run, vault) -> None:
    config_file(Path.cwd(), kv=vault.port)
    vault.store(model="SmolLM2", blocks=2)
    ran = run("top", "--once")
    assert ran.code == EXIT_OK, ran.err
    assert "1/3 up" in ran.out
    assert any("nas" in line and "kv-vault" in line for line in ran.out.splitlines())
    assert "TIERS" in ran.out


def test_nobody_there_and_bad_files_are_told(run) -> None:
    config_file(Path.cwd(), kv=1, ssm=2, inference=3)
    assert run("top", "--once").code == EXIT_UNREACHABLE
    assert run("record", "nowhere/x", "--for", "1s").code == EXIT_USAGE
    assert run("record", "x", "--for", "soon").code == EXIT_USAGE
