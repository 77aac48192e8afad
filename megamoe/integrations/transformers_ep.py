"""transformers' expert parallelism over our group: ep_implementation="megamoe".

transformers shards the experts and hands each rank its batch; rows travel as in `mm.MoE` over a
group, and each token is computed once. Inference only.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megamoe.errors import NotAvailable, require
from megamoe.integrations import transformers as ours
from megamoe.integrations.shared_batch import Sharers


def implementation(
    base: type, recipe: str | None, backend: str, max_tokens_per_rank: int | None
) -> type:
    """A class for transformers' `EPImplementationInterface`, made of its `EPImplementation`."""

    class MegaMoEGroup(base):  # type: ignore[misc]
        """The experts of one module on the ranks of `ep_mesh`; ranks of `tp_mesh` share a batch."""

        def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts
            self.cached: ours.CachedLayer | None = None
            num, rank = tp_mesh.size(), tp_mesh.get_local_rank()
            self.sharers = Sharers(num, rank, self._gather)

        def __call__(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            ours.refuse_gradients(self.experts)
            prepared = self._cached(top_k_index.shape[-1])
            if self.sharers.num == 1:
                return ours.call(prepared.layer, hidden_states, top_k_index, top_k_weights)

            def call(*part: Tensor) -> Tensor:
                return ours.call(prepared.layer, *part)

            return self.sharers.run(call, hidden_states, top_k_index, top_k_weights)

        def _gather(self, mine: Tensor) -> Tensor:
            every = mine.new_empty(self.sharers.num * len(mine), mine.shape[1])
            dist.all_gather_into_tensor(every, mine, group=self.tp_mesh.get_group())
            return every

        def _cached(self, top_k: int) -> ours.CachedLayer:
            """The layer over the group: made at the first call, which all ranks make."""
            if self.cached is None:
                layer = ours.make_layer(
                    self.experts, top_k, recipe, backend, group=self.ep_mesh.get_group(),
                    num_ranks=self.ep_mesh.size(), max_tokens_per_rank=max_tokens_per_rank,
                )  # fmt: skip
                self.cached = ours.keep(self.experts, top_k, layer)
            require(
                self.cached.is_current(self.experts, top_k),
                "the experts of a group must stay as they were at the first call",
                got="other parameters on this rank",
                fix="make the model anew: a layer over a group is made on all ranks at once",
                kind=NotAvailable,
            )
            return self.cached

    return MegaMoEGroup
