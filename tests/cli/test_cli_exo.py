"""The hook goes into a real environment with something in it that looks like EXO, and comes out of it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ASK = "import exo.worker.engines.mlx.cache as c; print(hasattr(c.KVPrefixCache.get_kv_cache, '__wrapped__'))"

# As much of EXO's cache module as the hook looks at; the hook's work is tested elsewhere.
CACHE = """
_MEMORY_THRESHOLD = 0.7
def get_memory_used_percentage(): ...
def make_kv_cache(model): ...
def has_non_kv_caches(cache): ...
def snapshot_ssm_states(cache): ...
class KVPrefixCache:
    def __init__(self, group):
        self.prompts, self.caches, self._snapshots, self._last_used, self._access_counter = [], [], [], [], 0
    def add_kv_cache(self, prompt_tokens, cache, ssm_snapshots=None): ...
    def update_kv_cache(self, index, prompt_tokens, cache, snapshots, restore_pos): ...
    def get_kv_cache(self, model, prompt_tokens): ...
    def _evict_if_needed(self): ...
    def get_memory_used_percentage(self): ...
"""


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **changes}


def make_exo(root: Path) -> Path:
    """A checkout with an environment in which a package ``exo`` has a cache module of EXO's shape."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / ".venv")], check=True, timeout=120)
    (root / "pyproject.toml").write_text('[project]\nname = "exo"\n')
    mlx = root / "src" / "exo" / "worker" / "engines" / "mlx"
    mlx.mkdir(parents=True)
    (mlx / "cache.py").write_text(CACHE)
    (mlx / "utils_mlx.py").write_text("def build_model_path(name): ...\ndef load_mlx_items(bound, group): ...\n")
    for folder in (mlx, *[p for p in mlx.parents if (root / "src") in p.parents]):
        (folder / "__init__.py").touch()
    site = site_of(root)
    (site / "_packages.pth").write_text(f"{root / 'src'}\n{sysconfig.get_paths()['purelib']}\n")
    return root


def site_of(root: Path) -> Path:
    return next((root / ".venv" / "lib").glob("python*/site-packages"))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_exo(tmp_path_factory.mktemp("exo"))


@pytest.fixture
def exo(pristine: Path, run):
    yield pristine
    run("uninstall", "--exo-path", str(pristine))


def trace(root: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in root.rglob("*") if p.is_file() and not p.is_symlink()}


def hooked(exo: Path, code: str = ASK, **changes: str) -> str:
    python = exo / ".venv" / "bin" / "python"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, env=environment(**changes), timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_installed_hooked_and_gone_without_a_trace(exo: Path, run):
    before = trace(exo)
    ran = run("install", "--exo-path", str(exo))
    assert ran.code == 0, ran.err
    assert ran.out.startswith("installed: ")
    assert "none of its files was changed" in ran.out
    assert hooked(exo) == "True"
    assert hooked(exo, TIERKV_EXO="0") == "False"
    assert {path: data for path, data in trace(exo).items() if path in before} == before
    ran = run("uninstall", "--exo-path", str(exo))
    assert ran.code == 0
    assert trace(exo) == before
    assert "nothing to remove" in run("uninstall", "--exo-path", str(exo)).out


def test_a_second_install_changes_nothing_and_a_damaged_one_is_repaired(exo: Path, run):
    run("install", "--exo-path", str(exo))
    first = trace(exo)
    assert run("install", "--exo-path", str(exo)).out.startswith("already there: ")
    assert trace(exo) == first
    (site_of(exo) / "tierkv_exo_hook" / "vendor" / "tierkv" / "units.py").unlink()
    assert "damaged" in run("install", "--check", "--exo-path", str(exo)).out
    assert run("install", "--exo-path", str(exo)).out.startswith("updated: ")
    assert trace(exo) == first


def test_the_hook_brings_its_own_tierkv_and_nothing_else(exo: Path, run):
    run("install", "--exo-path", str(exo))
    code = ASK + "; import tierkv, sys; print(tierkv.__file__); print(sorted(sys.modules))"
    wrapped, place, modules = hooked(exo, code).splitlines()
    assert wrapped == "True"
    assert Path(place).is_relative_to(site_of(exo))
    assert not {"grpc", "numba", "pydantic", "blake3", "textual", "tierkv.rpc", "tierkv.agents"} & set(eval(modules))


def test_spawned_processes_have_the_hook_and_others_import_nothing(exo: Path, run, tmp_path: Path):
    run("install", "--exo-path", str(exo))
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(f"""
        import multiprocessing, sys
        def child():
            {ASK}
        if __name__ == "__main__":
            assert not any(name.startswith("tierkv.") for name in sys.modules)
            process = multiprocessing.get_context("spawn").Process(target=child, daemon=True)
            process.start(); process.join(30)
    """)
    )
    python = exo / ".venv" / "bin" / "python"
    done = subprocess.run([str(python), str(script)], capture_output=True, text=True, env=environment(), timeout=180)
    assert done.stdout.strip() == "True", done.stderr


def test_the_seeds_way_and_settings(exo: Path, run, home: Path):
    Path("tierkv.toml").write_text(
        f'[inference]\nexo_path = "{exo}"\nsocket = "{home / "s.sock"}"\nall_ranks_hooked = true\n'
    )
    ran = run("install", "--json")
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert said["done"] == "installed"
    assert said["settings"] == {"TIERKV_SOCKET": str(home / "s.sock"), "TIERKV_ALL_RANKS_HOOKED": "1"}
    code = ASK + "; import os; print(os.environ['TIERKV_SOCKET'])"
    assert hooked(exo, code).splitlines() == ["True", str(home / "s.sock")]
    assert hooked(exo, code, TIERKV_SOCKET="/mine").splitlines() == ["True", "/mine"]


def test_check_tells_whether_a_running_exo_has_the_hook(exo: Path, run):
    ran = run("install", "--check", "--exo-path", str(exo))
    assert (ran.code, ran.out.splitlines()[0].split(" in ")[0]) == (1, "hook      not installed")
    run("install", "--exo-path", str(exo))
    ran = run("install", "--check", "--exo-path", str(exo))
    assert ran.code == 3
    assert "installed, up to date" in ran.out
    assert "active    no: the agent at 127.0.0.1:50050" in ran.out


def test_one_run_with_the_hook_and_nothing_installed(exo: Path, home: Path, tmp_path: Path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins; builtins.mine = 1\n")
    before = trace(exo)
    python = exo / ".venv" / "bin" / "python"
    command = [sys.executable, "-m", "tierkv", "exo", "--", str(python), "-c", ASK + "; print(mine)"]
    source = str(TESTS.parent)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False,
        env=environment(PYTHONPATH=os.pathsep.join([str(own), source])),
    )  # fmt: skip
    assert done.stdout.split() == ["True", "1"], done.stderr
    assert trace(exo) == before


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda root: root / "nowhere", "there is nothing there"),
        (lambda root: (root / "EXO.app").mkdir() or root / "EXO.app", "frozen application"),
        (lambda root: (root / "pyproject.toml").touch() or root, "run 'uv sync' there first"),
        (lambda root: root, "neither EXO's checkout"),
        (lambda root: Path(sys.executable), "has no package 'exo'"),
    ],
)
def test_what_is_not_an_environment_of_exo_is_explained(run, tmp_path: Path, make, said: str):
    place = tmp_path / "place"
    place.mkdir()
    ran = run("install", "--exo-path", str(make(place)))
    assert ran.code == 1
    assert said in ran.err


def test_an_exo_command_that_is_a_binary_is_a_frozen_one(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "EXO was not found" in run("install").err
    (tmp_path / "exo").write_bytes(b"\x7fELF\0")
    (tmp_path / "exo").chmod(0o755)
    assert "frozen application" in run("install").err


def test_an_exo_of_another_shape_is_refused(exo: Path, run):
    cache = exo / "src" / "exo" / "worker" / "engines" / "mlx" / "cache.py"
    before = cache.read_text()
    try:
        cache.write_text(before.replace("self, index, prompt_tokens, cache, snapshots", "self, index, pages"))
        ran = run("install", "--exo-path", str(exo))
    finally:
        cache.write_text(before)
    assert ran.code == 1
    assert "KVPrefixCache.update_kv_cache takes index, pages" in ran.err
    assert not (site_of(exo) / "tierkv_exo_hook.pth").exists()


# Root may write everywhere but into what is mounted read-only.
READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 99
shift; exec "$@"
"""


def where_nobody_may_write(exo: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command with an environment that this user cannot write to; skips where that cannot be had."""
    command = [sys.executable, "-m", "tierkv", *words, "--exo-path", str(exo)]
    site = site_of(exo)
    if os.geteuid() == 0:
        command = ["unshare", "-rm", "sh", "-c", READ_ONLY, "sh", str(site), *command]
    site.chmod(0o555)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=180, check=False, cwd=TESTS.parent, env=environment()
        )
    except FileNotFoundError:
        pytest.skip("this system has no unshare")
    finally:
        site.chmod(0o755)
    if done.returncode in (1, 99) and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    return done


def test_an_environment_of_somebody_else_is_explained(exo: Path, run):
    before = trace(exo)
    done = where_nobody_may_write(exo, "install")
    assert done.returncode == 1
    assert "no permission to write" in done.stderr
    assert "tierkv exo -- <command>" in done.stderr
    assert trace(exo) == before
    run("install", "--exo-path", str(exo))
    before = trace(exo)
    done = where_nobody_may_write(exo, "uninstall")
    assert done.returncode == 1
    assert "cannot be removed" in done.stderr
    assert trace(exo) == before
    assert where_nobody_may_write(exo, "install", "--check").stdout.startswith("hook      installed")
