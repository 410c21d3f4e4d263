"""Trains tables of torchrec on CPUs, and resumes them from a `Manager` on another number of ranks too.

`main` is the recipe: state dicts are saved and filled in place, with `partial`, as a table that is whole lies on one
rank alone.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import treeckpt as tc
from tests.helpers import framework_job as job

ROWS = {"users": 50, "goods": 31}
SHARDING = {"users": "column_wise", "goods": "table_wise"}  # of what torchrec has for CPUs
WIDTH = 8


class Ranker(nn.Module):
    """Two tables and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=WIDTH, num_embeddings=rows, feature_names=[name])
            for name, rows in ROWS.items()
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.over = nn.Linear(WIDTH * len(ROWS), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.tables(features).values()).square().mean()


def batch(step: int) -> KeyedJaggedTensor:
    """Returns the ids of a step for this rank: its part of 12 of each table."""
    seed = torch.Generator().manual_seed(step)
    ids = [torch.randint(rows, (12,), generator=seed) for rows in ROWS.values()]
    own = [one.chunk(dist.get_world_size())[dist.get_rank()] for one in ids]
    return KeyedJaggedTensor(list(ROWS), torch.cat(own), lengths=torch.ones(2 * len(own[0]), dtype=torch.int32))


def sharded() -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Returns the model over the ranks there are, and the optimizer of its tables and of its layer."""
    net, sharders = Ranker(), [EmbeddingBagCollectionSharder()]
    apply_optimizer_in_backward(RowWiseAdagrad, net.tables.parameters(), {"lr": 0.1})
    kinds = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name, kind in SHARDING.items()}
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=kinds)
    plan = planner.collective_plan(net, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(net, device=torch.device("cpu"), plan=plan, sharders=sharders)
    layer = {f"over.{name}": parameter for name, parameter in net.over.named_parameters()}
    dense = KeyedOptimizerWrapper(layer, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    dense.init_state()  # Adam's state, which is filled in place
    return model, CombinedOptimizer([model.fused_optimizer, ("dense", dense)])


def main() -> None:
    arguments = job.arguments()
    dist.init_process_group("gloo")
    model, optimizer = sharded()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    losses: dict[int, float] = {}
    with tc.Manager(arguments.directory / "run", every=2) as manager:
        with manager.open() as opened:
            if opened is not None:
                opened.load(into=state, partial=True)
        for step in range(manager.count + 1, arguments.steps + 1):
            loss = model(batch(step))
            losses[step] = loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if manager.should_save(step):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                if step == arguments.kill_at:
                    manager.wait()
                with job.killed_in_save() if step == arguments.kill_at else nullcontext():
                    manager.save(step, state)
    torch.save(losses, arguments.directory / f"losses-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
