"""Callers of the drop-in as they write it, and the float64 evaluation of the same call."""

from dataclasses import dataclass

import torch

from megamoe.compat import deep_gemm
from megamoe.formats.elements import e8m0_to_float, packed_e2m1_to_float
from megamoe.routing.samplers import sample_routing
from tests.reference import rules64

E, I, H, K = 4, 128, 256, 2


def cast_weights(w):
    """[E, n, k] -> packed FP4 and its scales in the required layout, as callers do."""
    groups, n, k = w.shape
    data = torch.empty(groups, n, k // 2, dtype=torch.int8, device=w.device)
    scale = torch.empty(groups, n, k // 32, dtype=torch.float32, device=w.device)
    for g in range(groups):
        data[g], scale[g] = deep_gemm.utils.per_token_cast_to_fp4(w[g], use_ue8m0=True, gran_k=32)
    scale = deep_gemm.transform_sf_into_required_layout(scale, n, k, (1, 32), groups)
    return data, scale


def values(data, scale):
    """float64 values of packed FP4 with row-contiguous packed scales, both [E, rows, ..]."""
    code = scale.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8)
    steps = e8m0_to_float(code, torch.float64).repeat_interleave(32, dim=2)
    return packed_e2m1_to_float(data.cpu().view(torch.uint8), torch.float64) * steps


@dataclass
class Case:
    """One rank's experts and tokens, cast and transformed."""

    mma_type: str
    num_tokens: int
    seed: int = 0
    skew: str = "uniform"
    masked_ratio: float = 0.0
    device: str = "cpu"

    def __post_init__(self):
        rng = torch.Generator().manual_seed(self.seed)
        w13 = torch.randn(E, 2 * I, H, generator=rng).bfloat16().to(self.device)
        w2 = torch.randn(E, H, I, generator=rng).bfloat16().to(self.device)
        self.x = torch.randn(self.num_tokens, H, generator=rng).bfloat16().to(self.device)
        idx, weight = sample_routing(
            self.num_tokens, E, K, skew=self.skew, masked_ratio=self.masked_ratio, seed=self.seed
        )
        self.idx, self.weight = idx.to(self.device), weight.to(self.device)
        self.plain = (w13, w2)
        if self.mma_type != "bf16xbf16":
            self.plain = (cast_weights(w13), cast_weights(w2))
        self.l1, self.l2 = deep_gemm.transform_weights_for_mega_moe(
            *self.plain, mma_type=self.mma_type
        )

    def buffer(self, max_tokens=40, **options):
        made = deep_gemm.get_symm_buffer_for_mega_moe(
            None, E, max_tokens, K, H, I, mma_type=self.mma_type, device=self.device, **options
        )
        for view in (made.x, made.x_sf, made.topk_weights):
            if view is not None:
                view.view(torch.uint8).fill_(255)  # NaN: rows that no one filled must not be read
        made.topk_idx.fill_(2**40)
        return made

    def fill(self, buffer):
        n = self.num_tokens
        if self.mma_type == "bf16xbf16":
            buffer.x[:n].copy_(self.x)
        else:
            fp4 = self.mma_type == "mxf4xmxf4"
            cast = deep_gemm.utils.per_token_cast_to_fp4 if fp4 else deep_gemm.per_token_cast_to_fp8
            data, scale = cast(self.x, use_ue8m0=True, gran_k=32, use_packed_ue8m0=True)
            buffer.x[:n].copy_(data)
            buffer.x_sf[:n].copy_(scale)
        buffer.topk_idx[:n].copy_(self.idx)
        buffer.topk_weights[:n].copy_(self.weight)

    def run(self, buffer, stats=None, clamp=None, **options):
        y = torch.full((self.num_tokens, H), torch.nan, dtype=torch.bfloat16, device=self.device)
        bf16 = self.mma_type == "bf16xbf16"
        call = deep_gemm.bf16_mega_moe if bf16 else deep_gemm.fp8_fp4_mega_moe
        call(
            y=y, l1_weights=self.l1, l2_weights=self.l2, sym_buffer=buffer,
            cumulative_local_expert_recv_stats=stats, activation_clamp=clamp, **options,
        )  # fmt: skip
        return y

    def expected(self, clamp=None):
        """The same call in float64, from the caller's own tensors."""
        (l1, l2), recipe = self.plain, "bf16"
        if self.mma_type == "bf16xbf16":
            w13, w2, x = l1.double().cpu(), l2.double().cpu(), self.x.double().cpu()
        else:
            w13, w2 = values(*l1), values(*l2)
            recipe = {"fp8xfp4": "w4a8", "mxf4xmxf4": "w4a4"}[self.mma_type]
            x = self._tokens()
        y = rules64.layer(
            x.float().numpy(), self.idx.cpu().numpy(), self.weight.cpu().numpy(),
            w13.view(E, 2, I, H).numpy(), w2.numpy(), recipe,
            clamp=float("inf") if clamp is None else clamp,
        )  # fmt: skip
        return torch.from_numpy(y)

    def _tokens(self):
        """The values of the cast tokens; rules64 quantises them again, to themselves."""
        if self.mma_type == "mxf4xmxf4":
            data, scale = deep_gemm.per_token_cast_to_fp4(self.x, True, 32)
            return deep_gemm.cast_back_from_fp4(data, scale, 32).cpu()
        data, scale = deep_gemm.per_token_cast_to_fp8(self.x, True, 32)
        return (data.float() * scale.repeat_interleave(32, dim=1)).cpu()

    def counts(self):
        return torch.tensor([(self.idx == e).sum() for e in range(E)], dtype=torch.int32)
