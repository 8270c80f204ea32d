"""Single values and runs of 64 of them as LLVM code, for the kernels: load, widen, round, compare, store.

Numba calls these like functions, but they emit their instructions in place, and on vectors where a name ends in
``_chunk``: LLVM splits those into what the processor has. So the kernels' speed does not depend on what LLVM's
vectoriser makes of a loop, and their first compilation is short.

The integer type of an array says what its bits are: uint16 is bfloat16, int16 is float16, uint32 is float32.
"""

# numba passes types where these functions are called with values, which linters and type checkers cannot see.
# ruff: noqa: ARG001

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

CHUNK = 64
ENCODE_LANES = 16
DECODE_LANES = 32
"""Values in one vector: of 8 to 64, these were the fastest on a Zen 3 core, by 2 to 10 %."""

AHEAD_BYTES = 4096
"""While one batch of groups is encoded, the next is fetched: 64 MB from memory at 8.2 GB/s instead of 6.6, with no loss
in cache; 1 and 2 KiB gain less, 8 and 16 no more."""

_FLOAT, _HALF, _I16, _I32 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)
_ROUND = 1.5 * 2**23


def _host_converts_half() -> bool:
    """Whether the processor that the kernels are compiled for has float16 conversions; where it has none, LLVM would
    call a library function that may be missing."""
    if getattr(config, "CPU_NAME", None) or getattr(config, "CPU_FEATURES", None):
        return False
    return platform.machine().lower() in ("arm64", "aarch64") or bool(get_host_cpu_features().get("f16c"))


HARDWARE_HALF = _host_converts_half()
"""float16 through the processor's own conversions: 9.9 / 17.2 GB/s to encode / decode where integer arithmetic gives
5.9 / 6.9. Results are the same."""


# --- instructions for one value or for a vector ---------------------------------------------------


def _wide(kind: Any, like: Any) -> Any:
    """``kind``, or a vector of it where ``like`` is a vector."""
    return ir.VectorType(kind, like.type.count) if isinstance(like.type, ir.VectorType) else kind


def _fixed(value: float, kind: Any, like: Any) -> Any:
    wide = _wide(kind, like)
    return ir.Constant(wide, [value] * wide.count if isinstance(wide, ir.VectorType) else value)


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    """A vector of ``lanes`` copies; the value itself for 0."""
    if not lanes:
        return value
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _magnitude(builder: Any, bits: Any, width: int) -> Any:
    return builder.and_(bits, _fixed((1 << (width - 1)) - 1, ir.IntType(width), bits))


def _widen(builder: Any, kind: Any, bits: Any) -> Any:
    """float32 of finite bits. Exact."""
    if kind == types.uint32:
        return builder.bitcast(bits, _wide(_FLOAT, bits))
    if kind == types.int16 and HARDWARE_HALF:
        return builder.fpext(builder.bitcast(bits, _wide(_HALF, bits)), _wide(_FLOAT, bits))
    word = builder.zext(bits, _wide(_I32, bits))
    if kind == types.uint16:
        return builder.bitcast(builder.shl(word, _fixed(16, _I32, word)), _wide(_FLOAT, word))
    # The bits 13 places up are the value times 2**-112, denormals included; the product is exact.
    shifted = builder.shl(builder.and_(word, _fixed(0x7FFF, _I32, word)), _fixed(13, _I32, word))
    value = builder.fmul(builder.bitcast(shifted, _wide(_FLOAT, word)), _fixed(2.0**112, _FLOAT, word))
    sign = builder.shl(builder.and_(word, _fixed(0x8000, _I32, word)), _fixed(16, _I32, word))
    return builder.bitcast(builder.or_(builder.bitcast(value, _wide(_I32, word)), sign), _wide(_FLOAT, word))


def _narrow(builder: Any, kind: Any, value: Any) -> Any:
    """Bits of the nearest value of the type, ties to even, of a float32 that does not round to infinity."""
    word = builder.bitcast(value, _wide(_I32, value))
    if kind == types.uint32:
        return word
    if kind == types.int16:
        half = builder.fptrunc(value, _wide(_HALF, value)) if HARDWARE_HALF else _narrow_half(builder, value, word)
        return builder.bitcast(half, _wide(_I16, value))
    odd = builder.and_(builder.lshr(word, _fixed(16, _I32, word)), _fixed(1, _I32, word))
    rounded = builder.add(builder.add(word, _fixed(0x7FFF, _I32, word)), odd)
    return builder.trunc(builder.lshr(rounded, _fixed(16, _I32, word)), _wide(_I16, word))


def _narrow_half(builder: Any, value: Any, word: Any) -> Any:
    """float16 bits by integer arithmetic."""

    def of(number: int) -> Any:
        return _fixed(number, _I32, word)

    sign = builder.and_(builder.lshr(word, of(16)), of(0x8000))
    size = builder.and_(word, of(0x7FFFFFFF))
    # Below 2**-14 the spacing is 2**-24, which is the spacing of float32 at 0.5: adding rounds.
    shifted = builder.fadd(builder.bitcast(size, _wide(_FLOAT, word)), _fixed(0.5, _FLOAT, word))
    tiny = builder.sub(builder.bitcast(shifted, _wide(_I32, word)), of(0x3F000000))
    odd = builder.and_(builder.lshr(size, of(13)), of(1))
    usual = builder.lshr(builder.add(builder.sub(size, of((112 << 23) - 0xFFF)), odd), of(13))
    rounded = builder.select(builder.icmp_unsigned("<", size, of(113 << 23)), tiny, usual)
    return builder.trunc(builder.or_(rounded, sign), _wide(_I16, word))


def _code(builder: Any, value: Any, inverse: Any) -> Any:
    """value * inverse rounded to nearest, ties to even, as int8: the sum's low byte, for magnitudes below 2**22."""
    product = builder.fadd(builder.fmul(value, inverse), _fixed(_ROUND, _FLOAT, value))
    return builder.trunc(builder.bitcast(product, _wide(_I32, value)), _wide(ir.IntType(8), value))


# --- memory ---------------------------------------------------------------------------------------


def _place(context: Any, builder: Any, array_type: Any, array: Any, index: Any, lanes: int) -> tuple[Any, int]:
    """A pointer to element ``index`` (no check, no negative indices) and its alignment in bytes."""
    pointer = builder.gep(context.make_array(array_type)(context, builder, array).data, [index])
    if lanes:
        item = context.get_data_type(array_type.dtype)
        pointer = builder.bitcast(pointer, ir.VectorType(item, lanes).as_pointer())
    return pointer, array_type.dtype.bitwidth // 8


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any, lanes: int) -> Any:
    pointer, align = _place(context, builder, array_type, array, index, lanes)
    loaded = builder.load(pointer, align=align)
    if not array_type.mutable:
        loaded.set_metadata("alias.scope", _scope(builder.module))
    return loaded


def _store(context: Any, builder: Any, array_type: Any, array: Any, index: Any, value: Any, lanes: int) -> None:
    pointer, align = _place(context, builder, array_type, array, index, lanes)
    builder.store(value, pointer, align=align).set_metadata("noalias", _scope(builder.module))


def _prefetch_chunk(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> None:
    """Asks for the cache lines of a chunk that is AHEAD_BYTES away, in the array or behind its end: it cannot fault."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
    pointer, item_bytes = _place(context, builder, array_type, array, index, 0)
    for line in range(0, CHUNK * item_bytes, 64):
        place = builder.gep(builder.bitcast(pointer, byte), [ir.IntType(64)(AHEAD_BYTES + line)])
        builder.call(prefetch, [place, _I32(0), _I32(3), _I32(1)])


def _scope(module: Any) -> Any:
    """Metadata that says: what is written never overlaps what is only read."""
    domain = module.add_metadata(["tierkv.codec"])
    return module.add_metadata([module.add_metadata(["tierkv.codec: only read", domain])])


def _offsets(lanes: int) -> Sequence[int]:
    return range(0, CHUNK, lanes) if lanes else (0,)


# --- what the kernels call ------------------------------------------------------------------------


@intrinsic
def get(typingctx, array, index):
    """Element ``index`` of an integer array."""

    def codegen(context, builder, signature, args):
        return _load(context, builder, signature.args[0], args[0], args[1], 0)

    return array.dtype(array, types.intp), codegen


@intrinsic
def put(typingctx, array, index, value):
    """Writes an integer."""

    def codegen(context, builder, signature, args):
        _store(context, builder, signature.args[0], args[0], args[1], args[2], 0)
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), codegen


def _unsigned(array: Any) -> Any:
    return types.uint32 if array.dtype == types.uint32 else types.uint16


@intrinsic
def get_magnitude(typingctx, array, index):
    """Bits without the sign, unsigned: their order is the order of magnitudes, with infinity and NaN last."""

    def codegen(context, builder, signature, args):
        bits = _load(context, builder, signature.args[0], args[0], args[1], 0)
        return _magnitude(builder, bits, bits.type.width)

    return _unsigned(array)(array, types.intp), codegen


@intrinsic
def peak_chunk(typingctx, array, index):
    """The largest magnitude among CHUNK values from ``index`` on."""

    def codegen(context, builder, signature, args):
        bits = _load(context, builder, signature.args[0], args[0], args[1], CHUNK)
        item = bits.type.element
        name = f"llvm.vector.reduce.umax.v{CHUNK}i{item.width}"
        reduce = cgutils.get_or_insert_function(builder.module, ir.FunctionType(item, [bits.type]), name)
        return builder.call(reduce, [_magnitude(builder, bits, item.width)])

    return _unsigned(array)(array, types.intp), codegen


@intrinsic
def larger(typingctx, a, b):
    """The larger of two unsigned integers of one type, without widening them."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.icmp_unsigned(">", args[0], args[1]), args[0], args[1])

    return a(a, a), codegen


@intrinsic
def get_float(typingctx, array, index):
    """float32 of the finite value at ``index``."""

    def codegen(context, builder, signature, args):
        bits = _load(context, builder, signature.args[0], args[0], args[1], 0)
        return _widen(builder, signature.args[0].dtype, bits)

    return types.float32(array, types.intp), codegen


@intrinsic
def float_of(typingctx, array, magnitude):
    """float32 of a finite magnitude of the array's type."""

    def codegen(context, builder, signature, args):
        return _widen(builder, signature.args[0].dtype, args[1])

    return types.float32(array, _unsigned(array)), codegen


@intrinsic
def put_float(typingctx, array, index, value):
    """Writes a float32 as the array's type, rounded to nearest, ties to even."""

    def codegen(context, builder, signature, args):
        bits = _narrow(builder, signature.args[0].dtype, args[2])
        _store(context, builder, signature.args[0], args[0], args[1], bits, 0)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


def _encoder(lanes: int) -> Any:
    def typed(typingctx, x, index, inverse, codes):
        def codegen(context, builder, signature, args):
            x_type, _, _, codes_type = signature.args
            factor = _splat(builder, args[2], lanes)
            if lanes:
                _prefetch_chunk(context, builder, x_type, args[0], args[1])
            for offset in _offsets(lanes):
                at = builder.add(args[1], args[1].type(offset))
                bits = _load(context, builder, x_type, args[0], at, lanes)
                code = _code(builder, _widen(builder, x_type.dtype, bits), factor)
                _store(context, builder, codes_type, args[3], at, code, lanes)
            return context.get_dummy_value()

        return types.void(x, types.intp, types.float32, codes), codegen

    return typed


def _decoder(lanes: int) -> Any:
    def typed(typingctx, codes, index, scale, out):
        def codegen(context, builder, signature, args):
            codes_type, _, _, out_type = signature.args
            factor = _splat(builder, args[2], lanes)
            for offset in _offsets(lanes):
                at = builder.add(args[1], args[1].type(offset))
                code = _load(context, builder, codes_type, args[0], at, lanes)
                value = builder.fmul(builder.sitofp(code, _wide(_FLOAT, code)), factor)
                _store(context, builder, out_type, args[3], at, _narrow(builder, out_type.dtype, value), lanes)
            return context.get_dummy_value()

        return types.void(codes, types.intp, types.float32, out), codegen

    return typed


encode_one = intrinsic(_encoder(0))
"""(x, index, inverse, codes): codes[index] = round(x[index] * inverse)."""

encode_chunk = intrinsic(_encoder(ENCODE_LANES))
"""The same for CHUNK values from ``index`` on."""

decode_one = intrinsic(_decoder(0))
"""(codes, index, scale, out): out[index] = codes[index] * scale, rounded to nearest."""

decode_chunk = intrinsic(_decoder(DECODE_LANES))
"""The same for CHUNK values from ``index`` on."""


@intrinsic
def bits_of(typingctx, value):
    """The bits of a float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), codegen


@intrinsic
def from_bits(typingctx, bits):
    """The float32 of 32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.uint32), codegen
