"""Logits -> experts and weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megamoe.errors import DTypeError, ShapeError, require
from megamoe.routing.spec import Router

_TINY = 1e-20  # keeps the sum of the winners' scores away from 0; far below one FP32 ulp of it


def route(logits: Tensor, router: Router, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts for every token, by the five steps of `Router`.

    logits   [T, num_experts] float
    router   the model's rule
    bias     [num_experts] float, DeepSeek-V3's e_score_correction_bias; or None
    returns  topk_idx int64 [T, top_k], best first; topk_weights float32 [T, top_k]

    The result for a token depends on its row alone. A row with NaN gets NaN weights, with NaN in
    the bias all rows do: the layer refuses them.
    """
    for name, value in (("logits", logits), ("bias", bias)):
        require(
            isinstance(value, Tensor) or (name == "bias" and value is None),
            f"{name} must be a tensor", got=type(value).__name__, kind=DTypeError,
        )  # fmt: skip
    require(
        isinstance(router, Router),
        "router must be a Router", got=type(router).__name__,
        fix="mm.Router(num_experts, top_k)", kind=DTypeError,
    )  # fmt: skip
    require(
        logits.ndim == 2 and logits.shape[1] == router.num_experts,
        f"logits must have shape [T, {router.num_experts}]",
        got=tuple(logits.shape),
        kind=ShapeError,
    )
    require(logits.is_floating_point(), "logits must be float", got=logits.dtype, kind=DTypeError)
    require(
        bias is None or tuple(bias.shape) == (router.num_experts,),
        f"bias must have shape [{router.num_experts}]",
        got=None if bias is None else tuple(bias.shape),
        kind=ShapeError,
    )
    scores = _score(logits.float(), router.score)
    choice = scores if bias is None else scores + bias.float()
    if router.num_groups > 1:
        choice = _keep_groups(choice, router.num_groups, router.num_kept_groups)
    topk_idx = _best(choice, router.top_k)
    weights = scores.gather(1, topk_idx)
    if bias is not None:  # NaN would win over every score
        weights = weights.masked_fill(bias.isnan().any(), float("nan"))
    if router.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + _TINY)
    return topk_idx, weights * router.scale


def _score(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits.softmax(dim=1)
    if score == "sigmoid":
        return logits.sigmoid()
    return F.softplus(logits).sqrt()


def _keep_groups(choice: Tensor, num_groups: int, num_kept: int) -> Tensor:
    """Minus infinity outside the best groups; a group's mark is the sum of its two best choices."""
    grouped = choice.unflatten(1, (num_groups, -1))
    mark = grouped.topk(2, dim=2).values.sum(dim=2)
    is_kept = torch.zeros_like(mark, dtype=torch.bool).scatter_(1, _best(mark, num_kept), True)
    return grouped.masked_fill(~is_kept[:, :, None], float("-inf")).flatten(1)


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest, best first; ties go to the lower (topk leaves that open)."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()
