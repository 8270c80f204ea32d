"""From what pydantic says is wrong to faults a person can act on: key path, value, line, suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tierkv.config.keys import keys
from tierkv.config.model import Config
from tierkv.errors import Fault

Location = tuple[str | int, ...]


def closest(word: str, words: Iterable[str]) -> str:
    """The word that was probably meant, or ""."""
    known = {candidate.lower().replace("-", "_"): candidate for candidate in words if candidate}
    near = difflib.get_close_matches(word.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    return known[near[0]] if near else ""


def path_text(location: Location) -> str:
    """``("cluster", "kv_cold", 1, "host")`` as ``cluster.kv_cold[1].host``; odd names are quoted."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        name = part if part.replace("-", "_").isidentifier() else repr(part)
        text += f".{name}" if text else name
    return text


def from_pydantic(error: Mapping[str, Any], where: str, line: int, location: Location) -> Fault:
    """``location`` is the error's place as the file has it (a lone table has no index)."""
    kind, value = str(error["type"]), error.get("input")
    problem, suggestion = _explain(kind, error, location)
    if kind in ("missing", "extra_forbidden") and isinstance(value, dict | list):
        value = None
    if isinstance(value, dict | list) and kind == "model_type":
        value = "a list" if isinstance(value, list) else "a table"
    return Fault(path_text(location), value, problem, suggestion, where, line)


def _explain(kind: str, error: Mapping[str, Any], location: Location) -> tuple[str, str]:
    context: Mapping[str, Any] = error.get("ctx") or {}
    if kind == "tierkv":
        suggestion = str(context["suggestion"])
        if "choices" in context and (near := closest(str(error["input"]), context["choices"])):
            suggestion = f"did you mean {near!r}?"
        return str(context["problem"]), suggestion
    if kind == "extra_forbidden":
        return "unknown key", _where_it_belongs(location)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "must be a table", f"write [{path_text(location)}] with its keys below it"
    if kind == "missing":
        return "is required", ""
    return str(error["msg"]), ""


def _where_it_belongs(location: Location) -> str:
    """A near miss beside it, else the section where a key of that name lives."""
    name, parent = str(location[-1]), _pattern(location[:-1])
    beside = {
        key.path.removeprefix(parent).split(".")[0].split("[")[0] for key in keys() if key.path.startswith(parent)
    }
    elsewhere = [key.path for key in keys() if key.path.rsplit(".", 1)[-1] == name]
    if elsewhere and name not in beside:
        section = elsewhere[0].rsplit(".", 1)[0].replace("[]", "")
        return f"{name} belongs in [{section}]"
    if near := closest(name, beside):
        return f"did you mean {near!r}?"
    everywhere = {key.path.rsplit(".", 1)[-1]: key.path for key in keys()}
    if near := closest(name, everywhere):
        return f"did you mean {everywhere[near]!r}?"
    return "see 'tierkv config schema'"


def _pattern(location: Sequence[str | int]) -> str:
    """The prefix that the key table uses for keys below ``location``."""
    text = ""
    for part in location:
        text += "" if isinstance(part, int) else f"{part}."
    return text.replace("kv_cold.", "kv_cold[].").replace("ssm_cold.", "ssm_cold[].")


def cross_checks(config: Config) -> list[tuple[Location, str, str]]:
    """What is wrong between keys that are right each by itself: (place, problem, suggestion)."""
    found: list[tuple[Location, str, str]] = []
    vault, inference, cluster = config.vault, config.inference, config.cluster
    if "max_record_bytes" in vault.model_fields_set and vault.max_record_bytes > vault.max_bytes:
        found.append((("vault", "max_record_bytes"), "is more than vault.max_bytes", "no such record could be kept"))
    if "frame_timeout_s" in inference.model_fields_set and inference.frame_timeout_s > inference.restore_timeout_s:
        place = ("inference", "frame_timeout_s")
        found.append((place, "is more than inference.restore_timeout_s", "one frame may not outlast the restore"))
    for name, peers in (("kv_cold", cluster.kv_cold), ("ssm_cold", cluster.ssm_cold)):
        seen: set[tuple[str, int]] = set()
        for number, peer in enumerate(peers or ()):
            if (peer.host, peer.port) in seen:
                place = ("cluster", name, number)
                found.append((place, f"{peer.host}:{peer.port} is given twice", "remove one"))
            seen.add((peer.host, peer.port))
    return found


def warnings(config: Config) -> list[tuple[str, str]]:
    """Keys that are accepted but do nothing, or less than they seem to: (key, what to know)."""
    found: list[tuple[str, str]] = []
    if "kv_dim" in config.inference.model_fields_set:
        found.append(("inference.kv_dim", "not needed: the sizes of a model are observed; remove it"))
    if config.cluster.recompute is not None:
        found.append(("cluster.recompute", "not used by this version: there is no recompute agent yet"))
    if config.security.insecure:
        found.append(("security.insecure", "everyone who reaches the agents' ports may read prompts"))
    if config.inference.memory_threshold > 0.95:
        found.append(("inference.memory_threshold", "above 0.95 the system may swap before anything is evicted"))
    return found
