"""Scale layouts: column-major over rows, columns 16 bytes aligned, four UE8M0 codes an int32."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.compat.deep_gemm.utils.math import (
    CODES_PER_WORD,
    align,
    ceil_div,
    check_powers_of_two,
)
from megamoe.errors import DTypeError, NotAvailable, RangeError, ShapeError, require

TMA_BYTES = 16
_contiguous_alignment = {"mk": 128}  # kept for callers; no kernel of megamoe reads it


def get_tma_aligned_size(mn: int, element_size: int) -> int:
    """mn elements, rounded up to whole 16 bytes."""
    return align(mn, TMA_BYTES // element_size)


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """The same FP32 scales [(g,) mn, k] with rows contiguous and columns 16 bytes aligned."""
    _check_scales(sf, (torch.float32,))
    return _mn_major(sf)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: Tensor, psum_layout: Tensor | None = None
) -> Tensor:
    """FP32 powers of two [(g,) mn, k] -> int32 [(g,) mn, ceil(k / 4)], rows contiguous."""
    _check_scales(sf, (torch.float32,))
    _refuse_psum(psum_layout)
    check_powers_of_two(sf.contiguous())
    code = (sf.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    code = torch.nn.functional.pad(code, (0, -sf.shape[-1] % CODES_PER_WORD))
    return _mn_major(code.view(torch.int32))


def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, int] | tuple[int, int, int],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: Tensor | None = None,
) -> Tensor:
    """Scales in the layout that the kernels of this GPU take.

    sf       float32 (or int32, packed already) [(num_groups,) ceil(mn / gran_mn), ceil(k / gran_k)]
    recipe   (gran_mn, gran_k), or (gran_m, gran_n, gran_k) with `is_sfa`
    returns  int32 [(num_groups,) mn, ceil(k / gran_k / 4)], row-contiguous, for gran_k 32 or 128;
             float32 for gran_k 128 on Hopper or with `disable_ue8m0_cast`, as upstream
    """
    gran_mn, gran_k = _granularity(recipe, is_sfa)
    _refuse_psum(psum_layout)
    _check_scales(sf, (torch.float32, torch.int32))
    packing = 1 if sf.dtype == torch.float32 else CODES_PER_WORD
    shape = (ceil_div(mn, gran_mn), ceil_div(k, gran_k * packing))
    wanted = shape if num_groups is None else (num_groups, *shape)
    require(
        tuple(sf.shape) == wanted,
        f"scales of a {mn} x {k} matrix in blocks of {gran_mn} x {gran_k} must be {wanted}",
        got=tuple(sf.shape),
        kind=ShapeError,
    )
    if sf.dtype == torch.int32:
        require(
            gran_mn == 1 and tuple(sf.stride()) == _strides(sf),
            "packed scales must be one per row, row-contiguous, columns 16 bytes aligned",
            got=f"blocks of {gran_mn} rows, strides {sf.stride()}",
            kind=ShapeError,
        )
        return sf
    if gran_k == 128 and (disable_ue8m0_cast or _is_hopper(sf.device)):
        return get_mn_major_tma_aligned_tensor(sf) if gran_mn == 1 else sf
    require(
        not disable_ue8m0_cast,
        "scales per 32 columns exist only as packed UE8M0",
        got="disable_ue8m0_cast=True",
        kind=RangeError,
    )
    if gran_mn > 1:
        sf = sf.repeat_interleave(gran_mn, dim=-2)[..., :mn, :]
    return get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows to which DeepGEMM's contiguous grouped GEMMs align a group; megamoe needs none."""
    return _contiguous_alignment["mk"]


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Remembered for `get_mk_alignment_for_contiguous_layout`, and nothing else."""
    _contiguous_alignment["mk"] = new_value


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """The alignment that a caller may set: 128, DeepGEMM's own outside of Blackwell."""
    return 128


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def _mn_major(sf: Tensor) -> Tensor:
    """A copy of `sf` in that layout."""
    return torch.empty_strided(sf.shape, _strides(sf), dtype=sf.dtype, device=sf.device).copy_(sf)


def _strides(sf: Tensor) -> tuple[int, ...]:
    """In memory [.., columns, rows], each column padded to whole 16 bytes."""
    *lead, mn, k = sf.shape
    column = get_tma_aligned_size(mn, sf.element_size())
    return (*[column * k] * len(lead), 1, column)


def _granularity(recipe: object, is_sfa: bool | None) -> tuple[int, int]:
    wanted = "recipe must be (gran_mn, gran_k), or (gran_m, gran_n, gran_k) with is_sfa"
    require(isinstance(recipe, (tuple, list)), wanted, got=recipe, kind=DTypeError)
    assert isinstance(recipe, (tuple, list))
    require(len(recipe) == (2 if is_sfa is None else 3), wanted, got=recipe, kind=RangeError)
    gran_mn, gran_k = recipe[0 if is_sfa is None or is_sfa else 1], recipe[-1]
    require(
        gran_mn in (1, 128) and gran_k in (32, 128),
        "scales come per 1 or 128 rows and per 32 or 128 columns",
        got=recipe,
        kind=RangeError,
    )
    return gran_mn, gran_k


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _refuse_psum(psum_layout: Tensor | None) -> None:
    require(
        psum_layout is None,
        "psum_layout belongs to DeepGEMM's grouped GEMMs, which are not part of megamoe",
        got="one",
        fix="leave it out: every row is packed",
        kind=NotAvailable,
    )


def _check_scales(sf: object, dtypes: tuple[torch.dtype, ...]) -> None:
    require(
        isinstance(sf, Tensor) and sf.dtype in dtypes,
        f"scales must be a tensor of {' or '.join(map(str, dtypes))}",
        got=getattr(sf, "dtype", type(sf).__name__),
        kind=DTypeError,
    )
    assert isinstance(sf, Tensor)
    require(
        sf.ndim in (2, 3), "scales must be [(groups,) rows, columns]", got=tuple(sf.shape),
        kind=ShapeError,
    )  # fmt: skip
