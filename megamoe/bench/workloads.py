"""Named models: the MoE layer of each as data. Standard library only; figures are the models' own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megamoe.errors import RangeError, one_of, require
from megamoe.formats.spec import recipe_on
from megamoe.problem import WIDTH_MULTIPLE, Options
from megamoe.routing.spec import Router


@dataclass(frozen=True, slots=True)
class Model:
    """The MoE layer of one model."""

    name: str
    hidden: int
    intermediate: int
    num_shared: int  # shared experts, which see every token
    recipe: str  # the one its checkpoint is published in; `recipe_on` a machine
    router: Router
    options: Options
    has_bias: bool = False

    @property
    def num_experts(self) -> int:
        return self.router.num_experts

    @property
    def top_k(self) -> int:
        return self.router.top_k

    def recipe_on(self, arch: str) -> str:
        """The recipe that it is deployed in on a machine, "sm_90a", "cpu", ..."""
        return recipe_on(self.recipe, arch)

    @property
    def bf16_bytes(self) -> int:
        """The routed experts' weights in BF16."""
        return 6 * self.num_experts * self.hidden * self.intermediate

    def scaled(self, scale: float) -> Model:
        """The same layer with both widths times `scale`; experts and routing stay as they are."""
        require(0 < scale <= 1, "scale must lie in (0, 1]", got=scale, kind=RangeError)
        return replace(
            self,
            hidden=_scaled(self.hidden, scale),
            intermediate=_scaled(self.intermediate, scale),
        )


def _scaled(width: int, scale: float) -> int:
    """A multiple of 32 near width * scale; a multiple of 128 only where the full width is one."""
    unit = 128 if width % 128 == 0 and width * scale >= 128 else WIDTH_MULTIPLE
    return max(round(width * scale / unit), 1) * unit


def _deepseek_v4(name: str, hidden: int, intermediate: int, experts: int, scale: float) -> Model:
    router = Router(experts, 6, "sqrt_softplus", scale=scale)
    return Model(name, hidden, intermediate, 1, "w4a8", router, Options(clamp=10.0))


_V3_ROUTER = Router(256, 8, "sigmoid", num_groups=8, num_kept_groups=4, scale=2.5)
_K2_ROUTER = Router(384, 8, "sigmoid", scale=2.827)

# fmt: off
MODELS: dict[str, Model] = {m.name: m for m in (
    _deepseek_v4("deepseek-v4-flash", 4096, 2048, 256, 1.5),
    _deepseek_v4("deepseek-v4-pro",   7168, 3072, 384, 2.5),
    Model("deepseek-v3",  7168, 2048, 1, "w8a8",  _V3_ROUTER,      Options()),
    Model("gpt-oss-120b", 2880, 2880, 0, "w4a16", Router(128, 4),  Options(activation="gpt_oss"), has_bias=True),
    Model("qwen3-235b",   4096, 1536, 0, "bf16",  Router(128, 8),  Options()),
    Model("kimi-k2",      7168, 2048, 1, "w8a8",  _K2_ROUTER,      Options()),
    Model("tiny",          256,  128, 1, "w4a8",  Router(8, 2),    Options(clamp=10.0)),
)}
# fmt: on


def model_named(name: str) -> Model:
    """The model of that name, or an error that lists the names."""
    one_of(name, tuple(MODELS), "preset")
    return MODELS[name]
