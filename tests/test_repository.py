"""What must hold of the files themselves."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def texts() -> list[tuple[Path, str]]:
    return [(path, path.read_text(encoding="utf-8", errors="ignore")) for path in tracked() if path != Path(__file__)]


@pytest.mark.parametrize(
    "forbidden",
    [
        r"/home/[a-z]+/",
        r"/Users/[A-Za-z]+/",
        r"/work/",
        r"/root/",
        r"\.\./shared",
        r"pypi\.org|files\.pythonhosted|index-url|find-links|trusted-host",
    ],
)
def test_no_file_names_a_machine_or_a_registry(forbidden: str):
    found = [path.relative_to(ROOT) for path, text in texts() if re.search(forbidden, text)]
    assert found == []


def test_every_make_command_of_the_documents_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"env", "demo", "test", "bench", "lint"} <= targets
    for path, text in texts():
        if path.suffix == ".md":
            assert set(re.findall(r"^ *make ([a-z]+)", text, flags=re.MULTILINE)) <= targets, path.name


def test_every_link_between_documents_leads_somewhere():
    for path, text in texts():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)|src(?:set)?=\"([^\":]+)\"", text):
            target = "".join(target)
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_file_the_readme_points_to_exists():
    for name in re.findall(r"`((?:tierkv|proto|tests|bench|docs)/[\w/.]+)`", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name


def test_generated_code_is_what_proto_generates():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.differences() == []


def test_version_is_said_once():
    import tierkv

    assert f'version = "{tierkv.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_test_files_have_names_of_their_own():
    names = [path.name for path in tracked() if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
