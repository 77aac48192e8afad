"""`Quantized`: what it holds, how it is cut, and what it and `quantize` refuse."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import megamoe as mm
from megamoe.errors import DeviceError, DTypeError, MegaMoEError, RangeError, ShapeError
from megamoe.formats.quantize import dequantize

from .support import NAMES, bits

ALL = (*NAMES, "bf16")
SHAPE = (4, 130, 160)


def sample(name: str, shape: tuple[int, ...] = SHAPE, g: object = None) -> mm.Quantized:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return mm.quantize(x, name, global_scale=g)


def assert_same_values(a: mm.Quantized, b: torch.Tensor) -> None:
    assert torch.equal(bits(mm.dequantize(a)), bits(b))


@pytest.mark.parametrize("index", [0, 3, -1])
@pytest.mark.parametrize("name", ALL)
def test_an_index_gives_a_view_of_one_entry(name, index):
    q = sample(name)
    entry = q[index]
    assert entry.shape == SHAPE[1:] and entry.format == name
    assert entry.data.untyped_storage().data_ptr() == q.data.untyped_storage().data_ptr()
    assert_same_values(entry, mm.dequantize(q)[index])


@pytest.mark.parametrize(
    "index", [slice(1, 3), slice(None), slice(-2, None), slice(0, 4, 2), slice(2, 99)], ids=str
)
@pytest.mark.parametrize("name", ALL)
def test_a_slice_gives_views_of_several_entries(name, index):
    q = sample(name)
    part = q[index]
    assert part.shape == (len(range(4)[index]), *SHAPE[1:]) and len(part) == part.shape[0]
    assert part.data.untyped_storage().data_ptr() == q.data.untyped_storage().data_ptr()
    assert_same_values(part, mm.dequantize(q)[index])


@pytest.mark.parametrize("name", ALL)
def test_an_empty_slice_has_no_entries(name):
    part = sample(name)[2:2]
    assert part.shape == (0, *SHAPE[1:]) and len(part) == 0
    assert mm.dequantize(part).shape == part.shape


@pytest.mark.parametrize("lead", [(), (4,), (4, 130)], ids=str)
def test_the_global_scale_is_cut_along_with_the_values(lead):
    g = torch.rand(lead, generator=torch.Generator().manual_seed(1)) + 0.5
    q = sample("nvfp4", g=g)
    assert q.global_scale.shape == lead
    for index in (1, slice(1, 3)):
        assert torch.equal(q[index].global_scale, g[index] if lead else g)
        assert_same_values(q[index], mm.dequantize(q)[index])


@pytest.mark.parametrize("name", [n for n in ALL if n != "fp8_128x128"])
def test_rows_can_be_picked_one_by_one(name):
    q = sample(name)
    assert_same_values(q[2][5], mm.dequantize(q)[2, 5])
    with pytest.raises(ShapeError, match="got"):
        q[2][5][0]


def test_square_blocks_are_never_cut():
    with pytest.raises(ShapeError, match="got"):
        sample("fp8_128x128")[0][0]
    with pytest.raises(ShapeError, match="got"):
        sample("fp8_128x128")[0][:64]


def test_indices_out_of_range_end_iteration():
    with pytest.raises(IndexError):
        sample("mxfp8")[4]


@pytest.mark.parametrize("name", ALL)
def test_moving_to_a_device_keeps_every_field(name):
    q = sample(name)
    moved = q.to("meta")
    assert {t.device.type for t in moved.tensors().values()} == {"meta"}
    assert (moved.format, moved.shape, moved.device) == (name, SHAPE, torch.device("meta"))
    assert moved.tensors().keys() == q.tensors().keys()
    for name_, t in q.to("cpu").tensors().items():
        assert torch.equal(bits(t), bits(q.tensors()[name_]))


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("bf16", 520 * 160 * 2),
        ("mxfp8", 520 * (160 + 5)),
        ("mxfp4", 520 * (80 + 5)),
        ("nvfp4", 520 * (80 + 10) + 4),
        ("fp8_1x128", 520 * (160 + 2 * 4)),
        ("fp8_128x128", 520 * 160 + 4 * 2 * 2 * 4),
    ],
)
def test_nbytes_counts_elements_scales_and_global_scale(name, want):
    assert sample(name).nbytes == want


@pytest.mark.parametrize("name", ALL)
def test_whole_blocks_take_the_bits_the_table_says(name):
    q = sample(name, (256, 256))
    extra = 0 if q.global_scale is None else q.global_scale.nbytes
    assert q.nbytes - extra == q.spec.bits_per_value * 256 * 256 / 8


@pytest.mark.parametrize("name", ALL)
def test_tensors_lists_what_is_stored(name):
    names = {"bf16": {"data"}, "nvfp4": {"data", "scale", "global_scale"}}
    assert sample(name).tensors().keys() == names.get(name, {"data", "scale"})


def test_fields_cannot_be_reassigned():
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample("mxfp8").format = "mxfp4"


FLOAT_SCALE = torch.ones(4, 130, 5)
MALFORMED = [
    ("mxfp8", {"format": "mxfp9"}, RangeError),
    ("mxfp8", {"data": None}, DTypeError),
    ("mxfp8", {"data": [1, 2]}, DTypeError),
    ("mxfp8", {"data": torch.zeros(SHAPE)}, DTypeError),
    ("mxfp8", {"data": torch.zeros(4, 130, 128).to(torch.float8_e4m3fn)}, ShapeError),
    ("mxfp8", {"scale": None}, DTypeError),
    ("mxfp8", {"scale": FLOAT_SCALE}, DTypeError),
    ("mxfp8", {"scale": torch.zeros(4, 130, 4, dtype=torch.uint8)}, ShapeError),
    ("mxfp8", {"scale": torch.zeros(4 * 130, 5, dtype=torch.uint8)}, ShapeError),
    ("mxfp8", {"shape": (4, 130, 128)}, ShapeError),
    ("mxfp8", {"shape": (4, 130, 150)}, ShapeError),
    ("mxfp8", {"shape": (4, 130, 0)}, ShapeError),
    ("mxfp8", {"shape": ()}, ShapeError),
    ("mxfp8", {"global_scale": torch.ones(())}, ShapeError),
    ("mxfp8", {"format": "mxfp4"}, DTypeError),
    ("mxfp4", {"data": torch.zeros(SHAPE, dtype=torch.uint8)}, ShapeError),
    ("mxfp4", {"data": torch.zeros(4, 130, 80, dtype=torch.int8)}, DTypeError),
    ("bf16", {"scale": FLOAT_SCALE}, ShapeError),
    ("bf16", {"data": torch.zeros(SHAPE, dtype=torch.float16)}, DTypeError),
    ("nvfp4", {"global_scale": None}, DTypeError),
    ("nvfp4", {"global_scale": 1.0}, DTypeError),
    ("nvfp4", {"global_scale": torch.ones(4, dtype=torch.float64)}, DTypeError),
    ("nvfp4", {"global_scale": torch.ones(3)}, ShapeError),
    ("nvfp4", {"global_scale": torch.ones(1)}, ShapeError),
    ("nvfp4", {"global_scale": torch.ones(130)}, ShapeError),
    ("nvfp4", {"global_scale": torch.ones(SHAPE)}, ShapeError),
    ("nvfp4", {"scale": torch.zeros(4, 130, 10, dtype=torch.uint8)}, DTypeError),
    ("fp8_1x128", {"scale": torch.ones(4, 130, 1)}, ShapeError),
    ("fp8_1x128", {"scale": torch.ones(4, 130, 2, dtype=torch.float64)}, DTypeError),
    ("fp8_128x128", {"scale": torch.ones(4, 1, 2)}, ShapeError),
    ("fp8_128x128", {"shape": (160,)}, ShapeError),
    ("mxfp8", {"scale": torch.zeros(4, 130, 5, dtype=torch.uint8, device="meta")}, DeviceError),
    ("nvfp4", {"global_scale": torch.ones((), device="meta")}, DeviceError),
]


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    MALFORMED,
    ids=[f"{name}-{next(iter(c))}-{i}" for i, (name, c, _) in enumerate(MALFORMED)],
)
def test_a_malformed_tensor_is_refused_by_the_right_error(name, changes, error):
    with pytest.raises(error, match="got") as caught:
        dataclasses.replace(sample(name), **changes)
    assert isinstance(caught.value, MegaMoEError)


REFUSED = [
    ([1.0] * 32, "mxfp8", None, DTypeError),
    (torch.zeros(2, 32, dtype=torch.float64), "mxfp8", None, DTypeError),
    (torch.zeros(2, 32, dtype=torch.int32), "mxfp4", None, DTypeError),
    (torch.zeros(2, 32), "fp6", None, RangeError),
    (torch.zeros(2, 32), "", None, RangeError),
    (torch.zeros(2, 48), "mxfp8", None, ShapeError),
    (torch.zeros(2, 16), "mxfp4", None, ShapeError),
    (torch.zeros(2, 8), "nvfp4", None, ShapeError),
    (torch.zeros(2, 100), "fp8_1x128", None, ShapeError),
    (torch.zeros(2, 0), "mxfp8", None, ShapeError),
    (torch.zeros(()), "mxfp8", None, ShapeError),
    (torch.zeros(32), "fp8_128x128", None, ShapeError),
    (torch.zeros(2, 33), "bf16", None, ShapeError),
    (torch.zeros(2, 32), "mxfp8", 1.0, RangeError),
    (torch.zeros(2, 32), "bf16", 1.0, RangeError),
    (torch.zeros(2, 32), "fp8_1x128", torch.ones(2), RangeError),
    (torch.zeros(2, 32), "nvfp4", 0.0, RangeError),
    (torch.zeros(2, 32), "nvfp4", -1.0, RangeError),
    (torch.zeros(2, 32), "nvfp4", math.inf, RangeError),
    (torch.zeros(2, 32), "nvfp4", math.nan, RangeError),
    (torch.zeros(2, 32), "nvfp4", 1e39, RangeError),
    (torch.zeros(2, 32), "nvfp4", 1e-46, RangeError),
    (torch.zeros(2, 32), "nvfp4", torch.tensor([1.0, 0.0]), RangeError),
    (torch.zeros(2, 32), "nvfp4", torch.ones(3), ShapeError),
    (torch.zeros(2, 32), "nvfp4", torch.ones(2, 1), ShapeError),
    (torch.zeros(2, 32), "nvfp4", torch.ones(2, 32), ShapeError),
]


@pytest.mark.parametrize(
    ("x", "name", "g", "error"), REFUSED, ids=[f"{c[1]}-{i}" for i, c in enumerate(REFUSED)]
)
def test_quantize_refuses_bad_input_by_the_right_error(x, name, g, error):
    with pytest.raises(error, match="got") as caught:
        mm.quantize(x, name, global_scale=g)
    assert isinstance(caught.value, MegaMoEError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_dequantize_refuses_narrow_types(dtype):
    with pytest.raises(DTypeError, match="got"):
        dequantize(sample("mxfp8"), dtype)
