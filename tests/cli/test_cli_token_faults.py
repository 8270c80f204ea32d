"""A token that was given and cannot be used: one line and the exit code of a faulty configuration, everywhere."""

import pytest

COMMANDS = [("agent", "--role", "inference"), ("agent", "--role", "ssm-vault"), ("vault",), ("status",)]


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("named", ["TIERKV_TOKEN", "token_file"])
def test_a_token_that_cannot_be_used_is_a_fault_of_the_configuration(run, monkeypatch, words, named):
    if named == "TIERKV_TOKEN":
        monkeypatch.setenv("TIERKV_TOKEN", "short")
    else:
        monkeypatch.setenv("TIERKV_SECURITY__TOKEN_FILE", "/no/such/token")
    ran = run(*words)
    assert ran.code == 2
    assert ran.out == ""
    assert "token" in ran.err
    assert ran.err.count("\n") == 1
