"""How fast the codecs are, beside C, numpy, memcpy and zstd, all in one run.

    python bench/codec.py [--json] [--rounds 1000]

GB/s count the bytes of the array that goes in (or comes out), never a wider type: bfloat16 is 2 bytes a value. Each
round runs every competitor in turn, twice, of which the second counts (whoever ran before has left the caches in some
state), and the best of all rounds is shown, so that a busy moment hits all alike.
Needs gcc for the comparison with C; without it those rows are left out. Data are normal values whose size differs by
channel: honest for speed, while ratios and errors on a real model come from the demonstration.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numba
import numpy as np
import zstandard
from _scratch import scratch_folder

from tierkv.codec.compiled import dequantise_kernel, quantise_kernel
from tierkv.codec.registry import CODEC_NAMES, codec_named, decode_segment, encode_segment, warm_up

C_SOURCE = Path(__file__).with_name("codec_c.c")
C_BUILDS = {"gcc": ("-O3", "-march=native")}
if platform.machine().lower() in ("x86_64", "amd64"):
    C_BUILDS["gcc, 256 bits"] = (*C_BUILDS["gcc"], "-mprefer-vector-width=256")
LAYOUTS = {("int8", 64, "bfloat16"): "bf16", ("int8-g256", 256, "float32"): "f32"}
SEGMENT_VALUES = 3 * 256 * 64
"""Keys of one layer for a block of 256 tokens with 3 heads of 64 (SmolLM2-135M): what one call does, and small enough
that a call fits between two interruptions of a busy machine."""

THREADED_VALUES = 40 * SEGMENT_VALUES
DRAM_BYTES = 64 << 20

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """The best of all rounds for one competitor."""

    case: str
    implementation: str
    threads: int
    bytes: int
    seconds: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio of two timings of this run, and what it should reach."""

    name: str
    ratio: float
    reach: float | None

    @property
    def met(self) -> bool:
        return self.reach is None or self.ratio >= self.reach


def sample(values: int, dtype: str) -> np.ndarray:
    """[values] bit patterns of ``dtype``."""
    rng = np.random.default_rng(1)
    channels = np.exp(rng.standard_normal(128)).astype(np.float32)
    floats = (rng.standard_normal((values // 128, 128), dtype=np.float32) * channels).reshape(-1)
    if dtype == "bfloat16":
        return (floats.view(np.uint32) >> 16).astype(np.uint16)
    return floats.astype(np.float16).view(np.int16) if dtype == "float16" else floats.view(np.uint32)


def best_of(competitors: dict[tuple[str, str, int], tuple[int, Run]], rounds: int) -> list[Timing]:
    """Runs all of them in turn, ``rounds`` times. Keys: case, implementation, threads; values: bytes, what to run."""
    seconds = dict.fromkeys(competitors, float("inf"))
    for _ in range(rounds):
        for key, (_, run) in competitors.items():
            run()
            start = time.perf_counter()
            run()
            seconds[key] = min(seconds[key], time.perf_counter() - start)
    return [Timing(*key, size, seconds[key], size / seconds[key] / 1e9) for key, (size, _) in competitors.items()]


# --- competitors ----------------------------------------------------------------------------------


def _aligned(values: int, dtype: np.dtype) -> np.ndarray:
    """[values] that begin at a multiple of 64 bytes, as what an engine hands over and what is decoded for it do."""
    memory = np.empty(values * dtype.itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + values * dtype.itemsize].view(dtype)


class Buffers:
    """One array and room for its codes, scales and decoded values."""

    def __init__(self, values: int, dtype: str, group: int, scale_type: str) -> None:
        self.group, self.dtype, self.scale_type = group, dtype, scale_type
        bits = sample(values, dtype)
        self.x, self.out = _aligned(values, bits.dtype), _aligned(values, bits.dtype)
        self.x[:] = bits
        self.codes = _aligned(values, np.dtype(np.int8))
        self.scales = _aligned(values // group, np.dtype(np.uint16 if scale_type == "bfloat16" else np.uint32))

    def encoder(self, part: slice = slice(None)) -> Run:
        kernel, group = quantise_kernel(self.dtype, self.scale_type), self.group
        x, codes, scales = self.x[part], self.codes[part], self.scales[self._groups(part)]
        return lambda: kernel(x, group, group, scales, codes)

    def decoder(self, part: slice = slice(None)) -> Run:
        kernel, group = dequantise_kernel(self.dtype, self.scale_type), self.group
        out, codes, scales = self.out[part], self.codes[part], self.scales[self._groups(part)]
        return lambda: kernel(codes, scales, group, group, out)

    def _groups(self, part: slice) -> slice:
        start, stop, _ = part.indices(self.x.size)
        return slice(start // self.group, stop // self.group)


class TwoThreads:
    """Runs two halves at once, many times over, so that starting threads costs nothing that counts."""

    def __init__(self, halves: tuple[Run, Run]) -> None:
        self.halves = halves

    def __call__(self) -> None:
        other = threading.Thread(target=self.halves[0])
        other.start()
        self.halves[1]()
        other.join()


def repeated(run: Run, times: int) -> Run:
    def loop() -> None:
        for _ in range(times):
            run()

    return loop


def numpy_encode(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    values = (x.astype(np.uint32) << 16).view(np.float32).reshape(-1, group)
    above, below = values.max(axis=1, keepdims=True), -values.min(axis=1, keepdims=True)
    scales = np.maximum(np.maximum(above, below) / np.float32(128), np.minimum(above, below) / np.float32(127))
    bits = scales.view(np.uint32)
    scales = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    scales = np.where(above >= below, -scales, scales)
    return scales, np.rint(values * (np.float32(1) / scales)).astype(np.int8)


def numpy_decode(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    bits = (codes.astype(np.float32) * scales).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def c_libraries(folder: Path) -> dict[str, ctypes.CDLL]:
    """The C file built in each way there is; empty without gcc."""
    gcc = shutil.which("gcc")
    built: dict[str, ctypes.CDLL] = {}
    for name, flags in C_BUILDS.items() if gcc else ():
        path = folder / f"{len(built)}.so"
        subprocess.run([gcc, *flags, "-shared", "-fPIC", "-o", path, C_SOURCE], check=True)
        built[name] = ctypes.CDLL(str(path))
    return built


def c_runs(library: ctypes.CDLL, name: str, buffers: Buffers) -> tuple[Run, Run]:
    def pointer(array: np.ndarray) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.ctypes.data)

    encode, decode = getattr(library, f"encode_{name}"), getattr(library, f"decode_{name}")
    x, scales, codes, out = map(pointer, (buffers.x, buffers.scales, buffers.codes, buffers.out))
    size = ctypes.c_ssize_t(buffers.x.size)
    return lambda: encode(x, scales, codes, size), lambda: decode(codes, scales, out, size)


# --- measurements ---------------------------------------------------------------------------------


def measure_kernels(libraries: dict[str, ctypes.CDLL], rounds: int) -> tuple[list[Timing], list[Target]]:
    timings: list[Timing] = []
    targets: list[Target] = []
    for codec, group, scale_type in LAYOUTS:
        for dtype in ("bfloat16", "float32", "float16"):
            buffers = Buffers(SEGMENT_VALUES, dtype, group, scale_type)
            size, case = buffers.x.nbytes, f"{codec} {dtype}"
            runs = {(f"{case} encode", "numba", 1): (size, buffers.encoder())}
            runs[f"{case} decode", "numba", 1] = (size, buffers.decoder())
            runs["copy of the same bytes", "memcpy", 1] = (size, lambda b=buffers: np.copyto(b.out, b.x))
            for name, library in libraries.items() if dtype != "float16" else ():
                encode, decode = c_runs(library, f"{'bf16' if dtype == 'bfloat16' else 'f32'}_{group}", buffers)
                check_equal(buffers, encode, decode)
                runs[f"{case} encode", name, 1] = (size, encode)
                runs[f"{case} decode", name, 1] = (size, decode)
            if dtype == "bfloat16":
                runs |= numpy_runs(case, buffers)
            found = best_of(runs, rounds)
            if dtype == "bfloat16":
                large = Buffers(THREADED_VALUES, dtype, group, scale_type)
                found += best_of(threaded_runs(case, large), max(20, rounds // 5))
            timings += found
            targets += kernel_targets(case, found, dtype)
    return timings, targets


def numpy_runs(case: str, buffers: Buffers) -> dict[tuple[str, str, int], tuple[int, Run]]:
    scales, codes = numpy_encode(buffers.x, buffers.group)
    return {
        (f"{case} encode", "numpy", 1): (buffers.x.nbytes, lambda: numpy_encode(buffers.x, buffers.group)),
        (f"{case} decode", "numpy", 1): (buffers.x.nbytes, lambda: numpy_decode(scales, codes)),
    }


def threaded_runs(case: str, buffers: Buffers, times: int = 8) -> dict[tuple[str, str, int], tuple[int, Run]]:
    half = buffers.x.size // 2
    parts = slice(0, half), slice(half, None)
    runs: dict[tuple[str, str, int], tuple[int, Run]] = {}
    for what, make in (("encode", buffers.encoder), ("decode", buffers.decoder)):
        first, second = (repeated(make(part), times) for part in parts)
        runs[f"{case} {what}, long", "numba", 1] = (times * buffers.x.nbytes, repeated(make(), times))
        runs[f"{case} {what}, long", "numba", 2] = (times * buffers.x.nbytes, TwoThreads((first, second)))
    return runs


def check_equal(buffers: Buffers, encode: Run, decode: Run) -> None:
    """C and numba write the same bytes, or there is nothing to compare."""
    buffers.encoder()()
    buffers.decoder()()
    ours = buffers.scales.copy(), buffers.codes.copy(), buffers.out.copy()
    encode()
    decode()
    for mine, theirs in zip(ours, (buffers.scales, buffers.codes, buffers.out), strict=True):
        if not np.array_equal(mine, theirs):
            raise SystemExit("bench/codec.py: the kernels and their C twins do not write the same bytes")


def kernel_targets(case: str, timings: list[Timing], dtype: str) -> list[Target]:
    speed = {(each.case, each.implementation, each.threads): each.gb_per_s for each in timings}
    targets: list[Target] = []
    for what, two in (("encode", 1.5), ("decode", 1.2)):
        mine = speed[f"{case} {what}", "numba", 1]
        c = max((speed.get((f"{case} {what}", name, 1), 0.0) for name in C_BUILDS), default=0.0)
        if c:
            targets.append(Target(f"{case} {what}, one thread / the faster C build", mine / c, 1.0))
        if dtype == "bfloat16":
            targets.append(Target(f"{case} {what} / numpy", mine / speed[f"{case} {what}", "numpy", 1], 4.0))
            long = f"{case} {what}, long"
            ratio = speed[long, "numba", 2] / speed[long, "numba", 1]
            targets.append(Target(f"{case} {what}, two threads / one", ratio, two))
    return targets


def measure_dram(rounds: int) -> tuple[list[Timing], list[Target]]:
    buffers = Buffers(DRAM_BYTES // 2, "bfloat16", 64, "bfloat16")
    size = buffers.x.nbytes
    runs: dict[tuple[str, str, int], tuple[int, Run]] = {
        ("64 MB from memory", "memcpy", 1): (size, lambda: np.copyto(buffers.out, buffers.x)),
        ("64 MB from memory, int8 encode", "numba", 1): (size, buffers.encoder()),
        ("64 MB from memory, int8 decode", "numba", 1): (size, buffers.decoder()),
    }
    found = best_of(runs, rounds)
    copy, encode, decode = (each.gb_per_s for each in found)
    return found, [
        Target("64 MB from memory, int8 encode / memcpy", encode / copy, 0.9),
        Target("64 MB from memory, int8 decode / memcpy", decode / copy, 0.9),
    ]


def measure_segments(rounds: int) -> list[dict[str, object]]:
    """Whole frames as the agent makes them: header, checksum and all, from one layer's keys of a block."""
    rows: list[dict[str, object]] = []
    for dtype in ("bfloat16", "float16", "float32"):
        bits = sample(SEGMENT_VALUES, dtype).reshape(1, 3, 256, 64)
        runs: dict[tuple[str, str, int], tuple[int, Run]] = {}
        sizes: dict[str, tuple[str, int]] = {}
        for name in CODEC_NAMES:
            codec, out = codec_named(name), np.empty_like(bits)

            def encode(codec=codec, bits=bits, dtype=dtype):
                return encode_segment(codec, bits, dtype, layer=0, index=0, position=256, token_axis=2)

            header, (_, payload) = encode()
            sizes[name] = (next(n for n in CODEC_NAMES if codec_named(n).id == header.codec), len(payload))
            runs[name, "encode", 1] = (bits.nbytes, encode)
            runs[name, "decode", 1] = (bits.nbytes, lambda h=header, p=payload, o=out: decode_segment(h, p, o))
        packer = zstandard.ZstdCompressor(level=1)
        packed = packer.compress(bits)
        sizes["zstd-1 of all bytes"] = ("", len(packed))
        runs["zstd-1 of all bytes", "encode", 1] = (bits.nbytes, lambda p=packer, b=bits: p.compress(b))
        unpacker = zstandard.ZstdDecompressor()
        runs["zstd-1 of all bytes", "decode", 1] = (bits.nbytes, lambda u=unpacker, p=packed: u.decompress(p))
        speed = {(each.case, each.implementation): each for each in best_of(runs, rounds)}
        for name, (used, length) in sizes.items():
            rows.append(
                {
                    "dtype": dtype,
                    "codec": name,
                    "used": used,
                    "raw_bytes": bits.nbytes,
                    "payload_bytes": length,
                    "ratio_to_input": bits.nbytes / length,
                    "encode_gb_per_s": speed[name, "encode"].gb_per_s,
                    "decode_gb_per_s": speed[name, "decode"].gb_per_s,
                }
            )
    return rows


def measure_overhead(rounds: int) -> list[dict[str, object]]:
    """Seconds a call takes that do not depend on the array: one token of one head."""
    bits = sample(128, "bfloat16")[:64].reshape(1, 1, 1, 64)
    out, runs = np.empty_like(bits), {}
    for name in CODEC_NAMES:
        codec = codec_named(name)

        def encode(codec=codec):
            return encode_segment(codec, bits, "bfloat16", layer=0, index=0, position=256, token_axis=2)

        header, (_, payload) = encode()
        runs[name, "encode", 1] = (bits.nbytes, encode)
        runs[name, "decode", 1] = (bits.nbytes, lambda h=header, p=payload: decode_segment(h, p, out))
    found = best_of(runs, rounds)
    return [{"codec": each.case, "direction": each.implementation, "seconds": each.seconds} for each in found]


# --- report ---------------------------------------------------------------------------------------


def machine() -> dict[str, object]:
    model = next(
        (line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")), platform.processor()
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "c_builds": {name: " ".join(flags) for name, flags in C_BUILDS.items()},
    }


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def print_report(document: dict, timings: list[Timing], targets: list[Target]) -> None:
    print(f"{document['machine']['cpu']}, best of {document['rounds']} rounds; GB/s of the input's own bytes\n")
    print(f"{'case':38} {'implementation':16} {'threads':>7} {'GB/s':>8}")
    for each in timings:
        print(f"{each.case:38} {each.implementation:16} {each.threads:7} {each.gb_per_s:8.2f}")
    print(f"\n{'frame of a [1, 3, 256, 64] segment':38} {'ratio to input':>16} {'encode':>8} {'decode':>8}")
    for row in document["segments"]:
        note = "" if row["used"] in ("", row["codec"]) else f"  (stored as {row['used']})"
        print(
            f"{row['dtype'] + ' ' + row['codec']:38} {row['ratio_to_input']:16.2f} {row['encode_gb_per_s']:8.2f} "
            f"{row['decode_gb_per_s']:8.2f}{note}"
        )
    print(
        "\nper call: "
        + ", ".join(f"{o['codec']} {o['direction']} {o['seconds'] * 1e6:.1f} us" for o in document["overhead"])
    )
    print(f"\n{'ratio in this run':66} {'is':>6} {'reach':>6}")
    for target in targets:
        reach = "" if target.reach is None else f"{target.reach:6.2f}  {'ok' if target.met else 'MISSED'}"
        print(f"{target.name:66} {target.ratio:6.2f} {reach}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    parser.add_argument("--rounds", type=int, default=1000, help="how often every competitor runs (default 1000)")
    options = parser.parse_args(arguments)
    warm_up(CODEC_NAMES)
    with scratch_folder() as folder:
        timings, targets = measure_kernels(c_libraries(folder), options.rounds)
        more_timings, more_targets = measure_dram(max(5, options.rounds // 40))
        timings, targets = timings + more_timings, targets + more_targets
    document = {
        "schema": "tierkv.bench.codec/1",
        "machine": machine(),
        "rounds": options.rounds,
        "timings": [asdict(each) for each in timings],
        "segments": measure_segments(options.rounds),
        "overhead": measure_overhead(options.rounds),
        "targets": [{**asdict(each), "met": each.met} for each in targets],
    }
    if options.json:
        json.dump(document, sys.stdout, indent=2)
        print()
    else:
        print_report(document, timings, targets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
