"""vLLM: experts through `mm.MoE`, by vLLM's own plugin mechanism (docs/vllm.md).

    pip install /path/to/megamoe                          # beside vLLM; nothing else to do
    VLLM_PLUGINS= vllm serve ...                          # without any plugin, ours too
    vllm serve ... --additional-config '{"megamoe": {"mxfp4": "w4a8_block"}}'

`register` is the entry point `megamoe` of the group `vllm.general_plugins`: vLLM calls it in every
process. A layer that we do not take stays vLLM's own, and the log says why, once.
"""

from __future__ import annotations


def register() -> None:
    """Offer our experts to vLLM; vLLM calls it, as often as it likes."""
    from megamoe.integrations.vllm.plugin import register as register_in_vllm

    register_in_vllm()
