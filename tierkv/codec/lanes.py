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
LANES = 16
"""Values in one vector: of 16, 32 and 64 the fastest on a Zen 4 core, by up to 20 %."""

BATCH_64, BATCH_256 = 16, 8
"""Groups of 64 and of 256 values whose scales are found before their codes are written, so that one division serves
all of them; also powers of two not above LANES."""

AHEAD = 2048
"""While one batch of groups is encoded, what is so many values on is fetched: 64 MB from memory at 18 GB/s, and a
tenth faster from the second-level cache. Half as many and twice as many gain less."""

_FLOAT, _DOUBLE, _HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()
_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_ROUND, _ROUND_DOUBLE = 1.5 * 2**23, 1.5 * 2**52


def _host_has(feature: str) -> bool:
    """Whether the processor that the kernels are compiled for has an x86 extension that every 64-bit ARM has an equal
    of; where it has none, LLVM would call a library function that may be missing."""
    if getattr(config, "CPU_NAME", None) or getattr(config, "CPU_FEATURES", None):
        return False
    return platform.machine().lower() in ("arm64", "aarch64") or bool(get_host_cpu_features().get(feature))


HARDWARE_HALF = _host_has("f16c")
"""float16 through the processor's own conversions, which are several times as fast as integer arithmetic. Results are
the same."""

HARDWARE_FMA = _host_has("fma")
"""Products and their rounding in one operation; without it, in float64. Results are the same."""


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


def _is_negative(builder: Any, bits: Any) -> Any:
    return builder.icmp_signed("<", bits, _zero(bits))


def _zero(bits: Any) -> Any:
    return ir.Constant(bits.type, None)


def _positive(builder: Any, bits: Any) -> Any:
    """The magnitude of what is not negative; 0 for what is."""
    return builder.select(_is_negative(builder, bits), _zero(bits), bits)


def _negative(builder: Any, bits: Any) -> Any:
    """The magnitude of what is negative; 0 for what is not."""
    item = bits.type.element if isinstance(bits.type, ir.VectorType) else bits.type
    magnitude = builder.and_(bits, _fixed((1 << (item.width - 1)) - 1, item, bits))
    return builder.select(_is_negative(builder, bits), magnitude, _zero(bits))


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


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32, rounded once; without the instruction only for products that float32 holds exactly, or
    where rounding twice is the same."""
    if not HARDWARE_FMA:
        return builder.fadd(builder.fmul(a, b), c)
    kind = a.type
    name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(fma, [a, b, c])


def _code_word(builder: Any, value: Any, inverse: Any) -> Any:
    """The low byte is the exact value * inverse rounded to nearest, ties to even; for magnitudes below 2**22."""
    if not HARDWARE_FMA:
        value, inverse = (builder.fpext(each, _wide(_DOUBLE, each)) for each in (value, inverse))
        rounded = builder.fadd(builder.fmul(value, inverse), _fixed(_ROUND_DOUBLE, _DOUBLE, value))
        return builder.trunc(builder.bitcast(rounded, _wide(_I64, rounded)), _wide(_I32, rounded))
    return builder.bitcast(_fused(builder, value, inverse, _fixed(_ROUND, _FLOAT, value)), _wide(_I32, value))


def _scale_bits(builder: Any, kinds: Any, positive: Any, negative: Any) -> Any:
    """Bits of the scale for groups with these largest magnitudes; ``kinds`` are the types of values and of scales.

    The larger of the two is code -128, so that the scale has the sign that makes it so. The other is at most 127.25:
    even a bfloat16 scale is less than 1/508 too small.
    """
    x_kind, scale_kind = kinds
    top, other = _largest(builder, positive, negative), _smallest(builder, positive, negative)
    value = builder.fmul(_widen(builder, x_kind, top), _fixed(1 / 128, _FLOAT, top))
    least = builder.fdiv(_widen(builder, x_kind, other), _fixed(127.0, _FLOAT, top))
    bits = _narrow(builder, scale_kind, builder.select(builder.fcmp_ordered(">", least, value), least, value))
    item = bits.type.element if isinstance(bits.type, ir.VectorType) else bits.type
    zero = _zero(positive)
    turned = builder.and_(builder.icmp_unsigned(">=", positive, negative), builder.icmp_unsigned(">", positive, zero))
    return builder.or_(bits, builder.select(turned, _fixed(1 << (item.width - 1), item, bits), _zero(bits)))


def _inverse(builder: Any, scale: Any) -> Any:
    """1 / scale, and 0 for 0."""
    zero = _fixed(0.0, _FLOAT, scale)
    quotient = builder.fdiv(_fixed(1.0, _FLOAT, scale), scale)
    return builder.select(builder.fcmp_ordered("!=", scale, zero), quotient, zero)


# --- vectors --------------------------------------------------------------------------------------


def _shuffled(builder: Any, a: Any, b: Any, chosen: Sequence[int]) -> Any:
    """The lanes ``chosen`` of ``a`` and, numbered on, of ``b``."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(chosen)), list(chosen)))


def _largest(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _smallest(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_unsigned("<", a, b), a, b)


def _largest_signed(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


_SIDES = ((_largest_signed, _positive), (_largest, _negative))
"""For positive and for negative floats: which of two bit patterns is the larger one, as long as there are some, and
what the magnitude of the largest is then, or 0."""


def _halved(builder: Any, largest: Any, bits: Any, lanes: int) -> Any:
    """[lanes]: the largest of the lanes that are a multiple of ``lanes`` apart."""
    while bits.type.count > lanes:
        half = bits.type.count // 2
        parts = (_shuffled(builder, bits, bits, range(at, at + half)) for at in (0, half))
        bits = largest(builder, *parts)
    return bits


def _paired(builder: Any, largest: Any, a: Any, b: Any, unit: int) -> Any:
    """Joins two vectors that each repeat ``unit`` lanes of partial results: unit by unit in turn, each the larger of
    two units of the same vector. They come from the same 128 bits while these hold two, where processors shuffle
    fastest."""
    lanes, block = a.type.count, 128 // a.type.element.width
    span = block if unit < block else lanes
    starts = [at + i for at in range(0, lanes, span) for i in range(0, span // 2, unit)]
    low = [at + i for start in starts for at in (start, lanes + start) for i in range(unit)]
    high = [index + span // 2 for index in low]
    return largest(builder, _shuffled(builder, a, b, low), _shuffled(builder, a, b, high))


def _low_bytes(builder: Any, words: Sequence[Any]) -> Any:
    """[4 * lanes] int8 of four [lanes] int32: the low byte of each, in order."""
    parts = list(words)
    for item in (_I16, _I8):
        kind = ir.VectorType(item, parts[0].type.count * parts[0].type.element.width // item.width)
        parts = [builder.bitcast(part, kind) for part in parts]
        even = range(0, 2 * kind.count, 2)
        parts = [_shuffled(builder, a, b, even) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


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
    """Asks for the cache lines of a chunk that is AHEAD values on, in the array or behind its end: it cannot fault."""
    byte = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
    pointer, item_bytes = _place(context, builder, array_type, array, index, 0)
    for line in range(0, CHUNK * item_bytes, 64):
        place = builder.gep(builder.bitcast(pointer, byte), [_I64(AHEAD * item_bytes + line)])
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


def _of_one(side: int) -> Any:
    def typed(typingctx, array, index):
        def codegen(context, builder, signature, args):
            return _SIDES[side][1](builder, _load(context, builder, signature.args[0], args[0], args[1], 0))

        return _unsigned(array)(array, types.intp), codegen

    return typed


def _of_chunk(side: int) -> Any:
    def typed(typingctx, array, index):
        def codegen(context, builder, signature, args):
            bits = _load(context, builder, signature.args[0], args[0], args[1], CHUNK)
            item, (_, magnitude) = bits.type.element, _SIDES[side]
            name = f"llvm.vector.reduce.{('smax', 'umax')[side]}.v{CHUNK}i{item.width}"
            reduce = cgutils.get_or_insert_function(builder.module, ir.FunctionType(item, [bits.type]), name)
            return magnitude(builder, builder.call(reduce, [bits]))

        return _unsigned(array)(array, types.intp), codegen

    return typed


positive_one, negative_one = intrinsic(_of_one(0)), intrinsic(_of_one(1))
"""(array, index): the magnitude of the value, unsigned, if it is positive (negative), and else 0. The order of
magnitudes is that of the numbers, with infinity and NaN last."""

positive_chunk, negative_chunk = intrinsic(_of_chunk(0)), intrinsic(_of_chunk(1))
"""The same of CHUNK values from ``index`` on: the largest."""


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
def put_scale(typingctx, scales, g, array, positive, negative):
    """scales[g] for a group of values of the array's type with these largest magnitudes."""

    def codegen(context, builder, signature, args):
        scales_type, _, array_type, _, _ = signature.args
        bits = _scale_bits(builder, (array_type.dtype, scales_type.dtype), args[3], args[4])
        _store(context, builder, scales_type, args[0], args[1], bits, 0)
        return context.get_dummy_value()

    return types.void(scales, types.intp, array, _unsigned(array), _unsigned(array)), codegen


@intrinsic
def get_inverse(typingctx, scales, g):
    """1 / scales[g], or 0 for a scale of 0."""

    def codegen(context, builder, signature, args):
        bits = _load(context, builder, signature.args[0], args[0], args[1], 0)
        return _inverse(builder, _widen(builder, signature.args[0].dtype, bits))

    return types.float32(scales, types.intp), codegen


@intrinsic
def put_float(typingctx, array, index, value):
    """Writes a float32 as the array's type, rounded to nearest, ties to even."""

    def codegen(context, builder, signature, args):
        bits = _narrow(builder, signature.args[0].dtype, args[2])
        _store(context, builder, signature.args[0], args[0], args[1], bits, 0)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


@intrinsic
def encode_one(typingctx, x, index, inverse, codes):
    """codes[index] = round(x[index] * inverse)."""

    def codegen(context, builder, signature, args):
        (x_type, _, _, codes_type), (x, index, inverse, codes) = signature.args, args
        value = _widen(builder, x_type.dtype, _load(context, builder, x_type, x, index, 0))
        code = builder.trunc(_code_word(builder, value, inverse), _I8)
        _store(context, builder, codes_type, codes, index, code, 0)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.float32, codes), codegen


@intrinsic
def encode_chunk(typingctx, x, index, inverse, codes):
    """The same for CHUNK values from ``index`` on."""

    def codegen(context, builder, signature, args):
        _encode_chunk(context, builder, signature.args, args)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.float32, codes), codegen


def _encode_chunk(context: Any, builder: Any, kinds: Any, args: Any) -> None:
    (x_type, _, _, codes_type), (x, index, inverse, codes) = kinds, args
    _prefetch_chunk(context, builder, x_type, x, index)
    factor, words = _splat(builder, inverse, LANES), []
    for offset in range(0, CHUNK, LANES):
        bits = _load(context, builder, x_type, x, builder.add(index, index.type(offset)), LANES)
        words.append(_code_word(builder, _widen(builder, x_type.dtype, bits), factor))
    _store(context, builder, codes_type, codes, index, _low_bytes(builder, words), CHUNK)


def _batch_encoder(chunks: int, batch: int) -> Any:
    """Writes ``batch`` groups of ``chunks`` chunks, at once from their scales on: a transposition in registers puts
    the peak of each group in a lane of its own."""
    group = chunks * CHUNK

    def typed(typingctx, x, start, scales, g, codes, low, high):
        def codegen(context, builder, signature, args):
            (x_type, index_type, scales_type, _, codes_type, _, _) = signature.args
            x, start, scales, g, codes, low, high = args
            peaks = _batch_peaks(context, builder, x_type, x, start, chunks, batch)
            usual = _all_usual(builder, _largest(builder, *peaks), low, high)
            with builder.if_then(usual, likely=True):
                bits = _scale_bits(builder, (x_type.dtype, scales_type.dtype), *peaks)
                _store(context, builder, scales_type, scales, g, bits, batch)
                inverses = cgutils.alloca_once(builder, ir.VectorType(_FLOAT, batch))
                builder.store(_inverse(builder, _widen(builder, scales_type.dtype, bits)), inverses)
                inverses = builder.bitcast(inverses, _FLOAT.as_pointer())
                kinds = x_type, index_type, types.float32, codes_type
                with cgutils.for_range(builder, start.type(batch)) as loop:
                    inverse = builder.load(builder.gep(inverses, [loop.index]))
                    first = builder.add(start, builder.mul(loop.index, start.type(group)))
                    for offset in range(0, group, CHUNK):
                        at = builder.add(first, first.type(offset))
                        _encode_chunk(context, builder, kinds, (x, at, inverse, codes))
            return usual

        return types.boolean(x, types.intp, scales, types.intp, codes, _unsigned(x), _unsigned(x)), codegen

    return typed


def _batch_peaks(
    context: Any, builder: Any, x_type: Any, x: Any, start: Any, chunks: int, batch: int
) -> tuple[Any, Any]:
    """Twice [batch] unsigned: the largest magnitude among the positive and the negative values of each of ``batch``
    groups from ``start`` on, or 0."""
    partial = ir.VectorType(context.get_data_type(x_type.dtype), LANES)
    kept = [cgutils.alloca_once(builder, partial, batch) for _ in _SIDES]
    with cgutils.for_range(builder, start.type(batch)) as loop:
        first, peaks = builder.add(start, builder.mul(loop.index, start.type(chunks * CHUNK))), [None, None]
        for offset in range(0, chunks * CHUNK, CHUNK):
            bits = _load(context, builder, x_type, x, builder.add(first, first.type(offset)), CHUNK)
            for side, (largest, _) in enumerate(_SIDES):
                peaks[side] = bits if peaks[side] is None else largest(builder, peaks[side], bits)
        for peak, place, (largest, _) in zip(peaks, kept, _SIDES, strict=True):
            builder.store(_halved(builder, largest, peak, LANES), builder.gep(place, [loop.index]))
    found = []
    for place, (largest, magnitude) in zip(kept, _SIDES, strict=True):
        vectors, unit = [builder.load(builder.gep(place, [start.type(k)])) for k in range(batch)], 1
        while len(vectors) > 1:
            vectors = [_paired(builder, largest, a, b, unit) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
            unit *= 2
        found.append(magnitude(builder, _halved(builder, largest, vectors[0], batch)))
    return found[0], found[1]


def _all_usual(builder: Any, peaks: Any, low: Any, high: Any) -> Any:
    """Whether every peak is zero or in the range from ``low`` to below ``high``."""
    lanes = peaks.type.count
    low, high = (_splat(builder, limit, lanes) for limit in (low, high))
    one = _fixed(1, peaks.type.element, peaks)
    tiny = builder.icmp_unsigned("<", builder.sub(peaks, one), builder.sub(low, one))
    unusual = builder.bitcast(builder.or_(tiny, builder.icmp_unsigned(">=", peaks, high)), ir.IntType(lanes))
    return builder.icmp_unsigned("==", unusual, ir.IntType(lanes)(0))


encode_batch_64 = intrinsic(_batch_encoder(1, BATCH_64))
"""(x, start, scales, g, codes, low, high): BATCH_64 groups of 64 values from ``start`` on, scales from ``g`` on; False,
with nothing written, unless each group's largest magnitude is 0 or from ``low`` to below ``high``."""

encode_batch_256 = intrinsic(_batch_encoder(4, BATCH_256))
"""The same for BATCH_256 groups of 256 values."""


def _decoder(lanes: int) -> Any:
    def typed(typingctx, codes, index, scale, out):
        def codegen(context, builder, signature, args):
            codes_type, _, _, out_type = signature.args
            factor = _splat(builder, args[2], lanes)
            for offset in _offsets(lanes):
                at = builder.add(args[1], args[1].type(offset))
                code = _load(context, builder, codes_type, args[0], at, lanes)
                # A code of 0 times a negative scale is -0; + 0 makes it +0, and changes nothing else.
                value = builder.sitofp(code, _wide(_FLOAT, code))
                value = _fused(builder, value, factor, _fixed(0.0, _FLOAT, value))
                _store(context, builder, out_type, args[3], at, _narrow(builder, out_type.dtype, value), lanes)
            return context.get_dummy_value()

        return types.void(codes, types.intp, types.float32, out), codegen

    return typed


decode_one = intrinsic(_decoder(0))
"""(codes, index, scale, out): out[index] = codes[index] * scale, rounded to nearest."""

decode_chunk = intrinsic(_decoder(LANES))
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
