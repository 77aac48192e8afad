"""Names of Gluon that changed after Triton 3.6: there Triton's own, later under their old name."""

from types import ModuleType, SimpleNamespace

import pytest
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from megamoe.kernels.gluon import compat
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter knows no Gluon")


@pytest.mark.skipif(compat.VERSION != (3, 6), reason="of Triton 3.6")
def test_at_3_6_every_name_is_tritons_own_object():
    assert compat.gl is language and compat.tma is tma and compat.async_copy is async_copy
    assert compat.blackwell_tma is blackwell.tma and not compat.HAS_PAIRS
    assert compat.get_tmem_reg_layout is blackwell.get_tmem_reg_layout


def test_a_later_module_is_copied_with_the_old_name_and_left_as_it_was():
    later = ModuleType("triton.later")
    later.async_load, later.other = object(), object()
    made = compat._copies(later)
    assert made.async_copy_global_to_shared is later.async_load and made.other is later.other
    assert type(made) is ModuleType and made.__name__ == later.__name__
    assert not hasattr(later, "async_copy_global_to_shared")


class Descriptor(language.shared_memory_descriptor):
    """Shared memory of [4, 32] FP32 that tells what is asked of it."""

    def __init__(self, asked):
        self.type = SimpleNamespace(element_ty=language.float32, shape=[4, 32], layout=None)
        self.asked = asked

    def _reinterpret(self, dtype, shape, layout, _semantic=None):
        self.asked.append((dtype, list(shape)))
        return SimpleNamespace(index=lambda i, _semantic=None: ("part", i))

    reinterpret = _reinterpret


@pytest.mark.parametrize(
    ("version", "shape"), [((3, 6), [4, 32]), ((3, 8), [2, 4, 32]), ((3, 9), [4, 32])]
)
def test_a_view_of_the_beginning_is_the_first_of_several_at_3_8(version, shape, monkeypatch):
    monkeypatch.setattr(compat, "VERSION", version)
    asked = []
    found = compat.reinterpret(
        Descriptor(asked), language.bfloat16, [4, 32], None, _semantic=object()
    )
    assert asked == [(language.bfloat16, shape)]
    assert (found == ("part", 0)) == (version == (3, 8))
