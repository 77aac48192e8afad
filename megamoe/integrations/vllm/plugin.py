"""The door into vLLM: its class of routed experts, with a method of ours where we can."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megamoe.engine.layer import MoE
from megamoe.integrations.vllm import exchange, layers

# Classes that hold experts: vLLM makes ours in their place. gpt-oss has one of its own.
HOLDERS = (
    ("vllm.model_executor.layers.fused_moe.routed_experts", "RoutedExperts"),
    ("vllm.model_executor.models.gpt_oss", "GptOssRoutedExperts"),
)
QUANTIZATION = "vllm.model_executor.layers.quantization"


def register() -> None:
    """Put our classes of experts in vLLM's table of replacements; a second call changes nothing."""
    import importlib

    try:
        from vllm.model_executor.custom_op import (  # type: ignore[import-not-found]
            op_registry_oot,
        )

        holders = [(name, getattr(importlib.import_module(at), name)) for at, name in HOLDERS]
    except (ImportError, AttributeError) as error:
        say(f"the plugin needs the RoutedExperts of vLLM 0.32 or newer: {error}")
        return
    for name, holder in holders:
        there = op_registry_oot.get(name)
        if there is None:
            holder.register_oot(_taking(holder))
        elif not getattr(there, "is_megamoe", False):
            say(f"another plugin has replaced vLLM's {name} by {there.__name__}: it stays")


@functools.cache
def say(message: str) -> None:
    """One line in vLLM's log, once."""
    from vllm.logger import init_logger  # type: ignore[import-not-found]

    init_logger("vllm.megamoe").info("megamoe: %s", message)


def _taking(holder: type) -> type:
    """A class of routed experts that asks us for its method."""

    class MegaMoERoutedExperts(holder):  # type: ignore[misc]
        is_megamoe = True

        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
            ask = functools.partial(super()._get_quant_method, prefix, quant_config, moe_config)
            return choose(self, ask)

    return MegaMoERoutedExperts


def choose(layer: Any, ask: Callable[[], Any]) -> Any:
    """The method of a layer: vLLM's own, or ours on top of it.

    layer  a RoutedExperts that is being made
    ask    gives vLLM's method
    """
    settings = layers.settings_of(_config().additional_config)
    if settings is None:
        say('vLLM\'s own experts: additional_config has {"megamoe": false}')
        return ask()
    method, error = _asked(ask)
    exchanges, why_theirs = exchange.is_wanted(layer, settings.exchange), ""
    if exchanges:
        why_theirs = exchange.why_not(layer, _config().parallel_config)
        exchanges = not why_theirs
    reason = layers.why_not(layer, method, settings, exchanges=exchanges)
    if reason:
        say(f"vLLM's own experts: {reason}")
        if error is not None:
            raise error
        return method
    theirs: Any = type(method)
    method.__class__ = _ours(theirs)
    method.megamoe_settings = settings
    if why_theirs:
        say(f"vLLM exchanges tokens: {why_theirs}")
    if exchanges:
        method.megamoe_over, method.moe_kernel = exchange.over(layer), exchange.Finished()
    return method


def _asked(ask: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """vLLM's method and, where vLLM has no kernel for it here, the error that it raised.

    Such a method is made without a kernel: it still knows which parameters a checkpoint has.
    """
    try:
        return ask(), None
    except Exception as error:  # vLLM raises ValueError, NotImplementedError and others
        try:
            with _no_kernels():
                return ask(), error
        except Exception:
            raise error from None


@contextmanager
def _no_kernels() -> Iterator[None]:
    """Let vLLM's methods pick no kernel of their own."""
    changed = []
    for name, module in list(sys.modules.items()):
        if not name.startswith(QUANTIZATION):
            continue
        for key in [key for key in vars(module) if key.startswith("select_")]:
            if key.endswith("_moe_backend"):
                changed.append((module, key, getattr(module, key)))
                setattr(module, key, lambda *args, **options: (None, None))
    try:
        yield
    finally:
        for module, key, value in changed:
            setattr(module, key, value)


class _Method:
    """What differs from vLLM's method: sizes, what is done once weights are there, the call."""

    supports_pre_processed_weights = False
    megamoe: MoE | None = None
    megamoe_settings: layers.Settings
    megamoe_over: exchange.Over | None = None

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def supports_eplb(self) -> bool:
        return False

    @property
    def skip_forward_padding(self) -> bool:
        return False

    @property
    def has_unpadded_output(self) -> bool:
        return False

    @property
    def topk_indices_dtype(self) -> None:
        return None

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **options: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.megamoe is not None:
            layers.reload(layer, self, self.megamoe_settings, self.megamoe, self.megamoe_over)
            return
        moe = layers.make_layer(layer, self, self.megamoe_settings, self.megamoe_over)
        object.__setattr__(self, "megamoe", moe)  # no part of the model's own tree
        w = moe.weights
        say(
            f"{w.num_experts} experts {w.hidden} x {w.intermediate} a layer run in {w.recipe}, "
            f"{moe.why}"
        )

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *shared: Any,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        assert self.megamoe is not None
        return layers.apply(layer, self.megamoe, x, topk_weights, topk_ids, self.megamoe_over)


@functools.cache
def _ours(theirs: type) -> type:
    """A subclass of a method of vLLM, under the same name: vLLM's loaders compare names."""
    excluded = ("__dict__", "__weakref__")
    own = {key: value for key, value in vars(_Method).items() if key not in excluded}
    return type(theirs.__name__, (theirs,), own)  # one base: an instance can change to it


def _config() -> Any:
    from vllm.config import get_current_vllm_config  # type: ignore[import-not-found]

    return get_current_vllm_config()
