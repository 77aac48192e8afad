"""Changes to what the compiler makes reach it, and leave others' alone."""

from types import SimpleNamespace

import pytest
import triton

from megamoe.kernels.hopper import code, stages, stream

KEYS = "megamoe.code 2megamoe.stream 1"


def test_streams_and_code_change_a_stage_each():
    made = {change[:2] for change in stages._CHANGES}
    assert made == {("ptx", stream.hinted), ("cubin", code.located)}


def test_who_looked_at_stages_before_still_does(monkeypatch):
    seen = []
    runtime = triton.knobs.runtime
    monkeypatch.setattr(runtime, "add_stages_inspection_hook", lambda *args: seen.append(args))
    monkeypatch.setattr(stages, "_CHANGES", [])
    stages.change("ptx", str.upper, "one")
    stages.change("ptx", lambda text: text + "!", "two")
    stages.change("another", str.lower, "three")
    made = {"ptx": lambda source, metadata: source, "cubin": lambda source, metadata: b""}
    runtime.add_stages_inspection_hook(None, made, None, None, 90)
    assert len(seen) == 1
    assert made["ptx"]("ret;", {}) == "RET;!" and made["cubin"]("", {}) == b""


@pytest.mark.parametrize("before", [None, lambda *args: ("theirs", "0123")])
def test_a_later_compiler_asks_for_a_key_first(before, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", before)
    stages._install()
    key, digest = triton.knobs.runtime.add_stages_inspection_hook()
    wanted = ("", "") if before is None else before()
    assert (key, digest) == tuple(part + KEYS for part in wanted)


def test_a_compiler_without_such_stages_is_left_alone(monkeypatch):
    runtime = SimpleNamespace(theirs=1)
    monkeypatch.setattr(triton.knobs, "runtime", runtime)
    stages._install()
    assert vars(runtime) == {"theirs": 1}
