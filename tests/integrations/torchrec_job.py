"""Trains tables of torchrec on CPUs, saves and resumes them with a `Manager`, on another number of ranks too."""

from __future__ import annotations

import os

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
KINDS = {"users": "column_wise", "goods": "table_wise"}


class Ranker(nn.Module):
    """Two tables and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=rows, feature_names=[name]) for name, rows in ROWS.items()]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.over = nn.Linear(8 * len(ROWS), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.tables(features).values()).square().mean()


def features(step: int) -> KeyedJaggedTensor:
    """Returns the rows of this rank in a step."""
    seed = torch.Generator().manual_seed(10 * step + int(os.environ["RANK"]))
    ids = [torch.randint(rows, (6,), generator=seed) for rows in ROWS.values()]
    return KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=torch.ones(12, dtype=torch.int32))


def distributed() -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Returns the model, sharded over the ranks there are, and the optimizer of all its parameters."""
    net = Ranker()
    apply_optimizer_in_backward(RowWiseAdagrad, net.tables.parameters(), {"lr": 0.1})
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name, kind in KINDS.items()}
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    sharders = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(net, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(net, device=torch.device("cpu"), plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper({f"over.{name}": one for name, one in net.over.named_parameters()}, lambda params: torch.optim.Adam(params, lr=0.01))
    return model, CombinedOptimizer([model.fused_optimizer, ("dense", dense)])


def main() -> None:
    arguments = job.arguments()
    dist.init_process_group("gloo")
    model, optimizer = distributed()
    print({k: type(v) for k, v in model.state_dict().items()})
    for step in range(3):
        loss = model(features(step))
        loss.backward()
        print(step, loss.item())
        optimizer.step()
    sd = optimizer.state_dict()
    print({k: {n: type(v) for n, v in s.items()} for k, s in sd["state"].items()}, sd.get("param_groups"))
    tc.save(arguments.directory, {"model": model.state_dict(), "optimizer": sd})
    if dist.get_rank() == 0:
        for l in tc.inspect(arguments.directory).entries: print(l.path, l.spec)


if __name__ == "__main__":
    main()
