"""Changes to what the compiler makes reach our kernels, and leave others' alone."""

import threading
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon import compiler_hooks, l2_policy
from megamoe.kernels.gluon.mega import prefetch_code
from megamoe.kernels.hopper.gemm import plain, swap_ab
from megamoe.kernels.hopper.mega import kernel
from tests.kernels.compiling import Stand, addresses, compile_kernel
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

KEYS = "megamoe.code 2megamoe.stream 1"


@gluon.jit
def prefetching_kernel(out):
    """Asks for its own address as ours do, but is not marked as ours."""
    prefetch_code.prefetch_code()
    gl.store(out, prefetch_code.code_address())


@triton.jit
def foreign_kernel(out):
    tl.store(out, 1)


def hook():
    return triton.knobs.runtime.add_stages_inspection_hook


def stages():
    return {"ptx": lambda source, metadata: source, "cubin": lambda source, metadata: b""}


def test_the_l2_policy_and_the_code_prefetch_change_a_stage_each():
    made = {change[:2] for change in compiler_hooks._CHANGES}
    assert made == {("ptx", l2_policy.hinted), ("cubin", prefetch_code.located)}


def test_kernels_that_need_a_change_are_marked():
    for one in (kernel.mega_kernel, swap_ab.gemm_swap_ab_kernel):
        assert one.is_ours
    assert not hasattr(plain.gemm_kernel, "is_ours") and not hasattr(foreign_kernel, "is_ours")


def test_nothing_is_installed_while_no_kernel_of_ours_is_compiled():
    assert hook() is None
    with compiler_hooks.applied():
        assert hook() is not None
    assert hook() is None


def test_a_kernel_of_somebody_else_is_compiled_as_it_stands(monkeypatch, tmp_path):
    """In caches of their own: one source compiled in two ways, which no program does."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "ours"))
    own = compile_kernel(
        compiler_hooks.ours(gluon.jit(prefetching_kernel.fn)), (Stand(torch.int64),), 90
    )
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "theirs"))
    other = compile_kernel(prefetching_kernel, (Stand(torch.int64),), 90)
    assert list(addresses(own)) == [(2, 0)]  # the kernel itself
    assert [kind for kind, _ in addresses(other)] == [1]  # the variable


def test_another_thread_sees_no_change_meanwhile(monkeypatch):
    monkeypatch.setattr(compiler_hooks, "_CHANGES", [("ptx", str.upper, "upper")])
    theirs, keys = stages(), []

    def foreign():
        hook()(None, theirs, None, None, 90)
        keys.append(hook()())

    with compiler_hooks.applied():
        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()
        own = stages()
        hook()(None, own, None, None, 90)
    assert theirs["ptx"]("ret;", {}) == "ret;" and own["ptx"]("ret;", {}) == "RET;"
    assert keys == [("", "")]


def test_a_hook_that_was_there_before_is_called_and_restored(monkeypatch):
    seen = []

    def before(*args):
        seen.append(args)

    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", before)
    monkeypatch.setattr(
        compiler_hooks, "_CHANGES",
        [("ptx", str.upper, "1"), ("ptx", lambda text: text + "!", "2"), ("else", str, "3")],
    )  # fmt: skip
    made = stages()
    with compiler_hooks.applied(), compiler_hooks.applied():
        hook()(None, made, None, None, 90)
    assert len(seen) == 1 and hook() is before
    assert made["ptx"]("ret;", {}) == "RET;!" and made["cubin"]("", {}) == b""


@pytest.mark.parametrize("before", [None, lambda *args: ("theirs", "0123")])
def test_a_later_compiler_asks_for_a_key_first(before, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", before)
    with compiler_hooks.applied():
        key, digest = hook()()
    wanted = ("", "") if before is None else before()
    assert (key, digest) == tuple(part + KEYS for part in wanted)


def test_a_compiler_without_such_stages_is_left_alone(monkeypatch):
    runtime = SimpleNamespace(debug=False)
    monkeypatch.setattr(triton.knobs, "runtime", runtime)
    with compiler_hooks.applied():
        assert vars(runtime) == {"debug": False}
    assert vars(runtime) == {"debug": False}


def test_a_launch_compiles_a_marked_kernel_with_the_changes(monkeypatch):
    """Through the jit function's own way, in which a launch compiles."""
    active = []

    class Kernel:
        compile = staticmethod(lambda source: active.append(compiler_hooks._COMPILING.depth))

        def _do_compile(self, source):
            return self.compile(source)

    marked = compiler_hooks.ours(Kernel())
    marked._do_compile("source")
    marked._do_compile("source")
    assert active == [1, 1] and compiler_hooks._COMPILING.depth == 0 and hook() is None
