"""What the kernels' PTX means."""

import time

import torch

from megamoe.kernels.gluon import arithmetic, exchange, l2_policy, pipeline, tile_scheduler
from megamoe.kernels.gluon.mega import sync
from megamoe.kernels.hopper.weights import decode
from tests.emulator import running
from tests.emulator.running import HERE, WORDS
from tests.emulator.values import Value, pair


def _words(w):
    """uint8 [.., 4] -> int64 [..]: bytes as numbers of 32 bits."""
    if w.t.dtype == torch.int32:
        return w.t.to(torch.int64) & 0xFFFFFFFF
    parts = w.t.to(torch.int64)
    return parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16 | parts[..., 3] << 24


MAGNITUDE = torch.tensor([0, 4, 8, 12, 16, 20, 24, 28])  # where a word has its eight codes
SIGN = torch.tensor([7, 15, 23, 31, 3, 11, 19, 27])


def _nibbles(word):
    """Magnitudes and signs of a word's eight codes, four and four."""
    word = word[..., None]
    magnitude, sign = word >> MAGNITUDE & 7, word >> SIGN & 1
    for half in (slice(4), slice(4, 8)):
        yield magnitude[..., half], sign[..., half]


def _e4m3_table():
    """E4M3 bytes [shift, code]; a code's fourth bit is its sign."""
    shift = torch.arange(16)[:, None]
    low, high = shift * 0x08080800 + 0x14100800, shift * 0x08080808 + 0x24201C18
    magnitudes = torch.cat([half >> 8 * j & 255 for half in (low, high) for j in range(4)], -1)
    return torch.cat((magnitudes, magnitudes | 0x80), -1).to(torch.uint8).flatten()


TO_E4M3 = _e4m3_table()


def _four_to_e4m3(w, s):
    """The four words of a row: E4M3 of each, low and high."""
    words = (w.t.to(torch.int64) & 0xFFFFFFFF)[..., None]
    shift = s.t[..., :1].to(torch.int64)
    assert int(shift.min()) >= 0 and int(shift.max()) < 16, "a shift that the table does not have"
    code = (words >> MAGNITUDE & 7) | (words >> SIGN & 1) << 3 | shift[..., None] << 4
    values = TO_E4M3[code].view(torch.float8_e4m3fn)
    return [Value(values[..., step, half]) for step in range(4) for half in (slice(4), slice(4, 8))]


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _to_bf16(w, scales):
    for (magnitude, sign), scale in zip(_nibbles(_words(w)), scales, strict=True):
        value = E2M1[magnitude] * (1 - 2 * sign.float()) * scale
        yield Value(value.bfloat16())


def _placed_to_bf16(w, s):
    scale = torch.pow(2.0, s.t.expand(w.t.shape)[..., :1].double() - 253)
    word = _words(w)
    for pairs in (((6, 15), (3, 12)), ((0, 13), (9, 14))):  # magnitude and sign of its 16 bits
        found = [
            E2M1[word >> lane + at & 7].double() * (1 - 2 * (word >> lane + sign & 1))
            for at, sign in pairs for lane in (0, 16)
        ]  # fmt: skip
        yield Value((torch.stack(found, -1) * scale).bfloat16())


def _mx_to_bf16(w, s, high, low):
    assert (high.t == decode.MX_BYTES.value).all() and (low.t == decode.LOW_BYTES.value).all()
    scale = torch.pow(2.0, s.t.expand(w.t.shape)[..., :1].double() - 127).float()
    return _to_bf16(w, (scale, scale))


def _nv_to_bf16(w, s, high, low):
    assert (high.t == decode.NV_BYTES.value).all() and (low.t == decode.LOW_BYTES.value).all()
    both = s.t.expand(w.t.shape)[..., :1].to(torch.int64)
    return _to_bf16(
        w,
        [
            (both >> shift & 255).to(torch.uint8).view(torch.float8_e4m3fn).float()
            for shift in (0, 8)
        ],
    )


def _divide(a, b):
    return Value(torch.as_tensor(a.t).float() / torch.as_tensor(b.t).float())


def _wait_for(compare):
    """As `pipeline.wait_text` says, but that its bound is the emulator's if that is shorter."""

    def wait(address, want, report, bound_ns):
        launch, begin = HERE.launch, time.monotonic()
        bound = min(int(bound_ns) / 1e9, running.WAIT_S)
        words, wanted = torch.broadcast_tensors(address.t, torch.as_tensor(want.t))
        both = torch.cat((words.reshape(-1), report.t.reshape(1)))
        with WORDS:
            while True:
                found = launch.memory.load(both, torch.int32)
                seen, is_reported = found[:-1].view(words.shape), int(found[-1])
                is_late = time.monotonic() - begin > bound or launch.error is not None
                if bool(compare(seen, wanted).all()) or is_reported or is_late:
                    return Value(seen)
                WORDS.wait(0.02)

    return wait


def _signal_ranks(address, value, mask):
    """As `sync.signal_text`."""
    address, value, mask = torch.broadcast_tensors(address.t, value.t, mask.t)
    keep = mask != 0
    with WORDS:
        if bool(keep.any()):
            HERE.launch.memory.store(address[keep], value[keep].to(torch.int32))
        WORDS.notify_all()
    return Value(0)


def _report(report, seen, want, rank, cta, what, where):
    """As `sync.REPORT`: the first who did not see what it wanted."""
    memory = HERE.launch.memory
    at = int(report.t) + 4 * torch.arange(7)
    reported = [torch.as_tensor(v.t) for v in (rank, cta, what, where, want, seen)]
    reported = [v.reshape(-1) for v in torch.broadcast_tensors(*reported)]
    wrong = (reported[-1] != reported[-2]).nonzero().flatten().tolist()
    with WORDS:
        if wrong and not memory.load(at[:1], torch.int32).any():
            words = [1, *(int(v[wrong[0]]) for v in reported)]
            memory.store(at, torch.tensor(words, dtype=torch.int32))
            WORDS.notify_all()
    return Value(0)


def _give_up(seen, value, given_up, error):
    """As `tile_scheduler.GIVE_UP`; waits of staged launches end here with what they waited for."""
    assert bool((seen.t >= value.t).all())
    return Value(0)


def _signal(address, call):
    _store_word(address, call)
    return Value(0)


def _store_if_missed(address, seen, want, rank):
    """As `exchange.STORE_IF_MISSED`."""
    if int(seen.t) < int(want.t):
        _store_word(address, rank)
    return Value(0)


def _store_word(address, word):
    with WORDS:
        at = torch.as_tensor(address.t).reshape(1)
        HERE.launch.memory.store(at, torch.tensor([int(word)], dtype=torch.int32))
        WORDS.notify_all()


ASSEMBLY = {
    **{pipeline.wait_text(scope, "ge"): _wait_for(torch.ge) for scope in ("gpu", "sys")},
    **{sync.signal_text(scope): _signal_ranks for scope in ("gpu", "sys")},
    exchange.SIGNAL.value: _signal,
    exchange.STORE_IF_MISSED.value: _store_if_missed,
    tile_scheduler.GIVE_UP.value: _give_up,
    "bfe.u32 $0, $1, 10, 10;": lambda x: x >> 10 & 1023,
    decode.FOUR_TO_E4M3.value: _four_to_e4m3,
    decode.PLACED_TO_BF16.value: _placed_to_bf16,
    decode.MX_TO_BF16.value: _mx_to_bf16,
    decode.NV_TO_BF16.value: _nv_to_bf16,
    pipeline.wait_text("gpu", "eq"): _wait_for(torch.eq),
    sync.REPORT.value: _report,
    l2_policy.MARK.value: lambda policy: Value(0),
    "": lambda x: x,
    "rcp.approx.ftz.f32 $0, $1;": lambda x: Value(1.0 / x.t),
    arithmetic.RECIPROCAL.value: lambda x: Value(1.0 / x.t),
    arithmetic.DIVIDE.value: lambda a, b, reciprocal: _divide(a, b),
    "ex2.approx.ftz.f32 $0, $1;": lambda x: Value(x.t.exp2()),
    "mul.rn.f32 $0, $1, $2;": lambda a, b: a * b,
}


def inline_asm_elementwise(text, constraints, args, dtype, is_pure, pack):
    if text in ASSEMBLY:
        found = ASSEMBLY[text](*(a if isinstance(a, Value) else Value(a) for a in args))
        return tuple(found) if isinstance(dtype, tuple) else found
    if text.startswith(("min.NaN", "max.NaN")):
        return pair(torch.minimum if text.startswith("min") else torch.maximum)(*args)
    if "cvt.rn.bf16x2" in text:
        return Value(args[0].t.bfloat16().float())
    if text.startswith("prefetch"):
        return Value(0)
    if "mov.u64 $0, %globaltimer" in text:
        return Value(torch.tensor(time.monotonic_ns(), dtype=torch.int64))
    if "globaltimer_lo" in text:
        return Value(torch.tensor(time.monotonic_ns() & 0x7FFFFFFF, dtype=torch.int32))
    assert not args, f"no meaning is known for {text!r}"
    return Value(torch.tensor(0, dtype=torch.int32))  # fences, launch control
