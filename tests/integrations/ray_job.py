"""Trains with Ray Train, FSDP2 and `treeckpt.integrations.ray` on two nodes of one machine; goes on from what is there.

python -m tests.integrations.ray_job DIRECTORY STEPS WORKERS [--kill-at STEP] [--failures N] [--request-at STEP]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

# Without clusters, for Ray, all addresses are loopback ones.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}
os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "300"  # on a busy machine

import pyarrow.fs
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import treeckpt as tc
import treeckpt.integrations.ray as tc_ray
from tests.helpers.framework_job import killed_in_save, network

BATCHES = 2
"""Parts of the data of a step: one for each of two workers, or both for one."""
EVERY = 2


def train(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    net = network()
    if size > 1:
        fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses: dict[int, float] = {}
    with tc_ray.manager(every=EVERY) as manager:
        found = tc_ray.restore(manager, net, optimizer)
        known = [Path(one.checkpoint.path).name for one in ray.train.get_all_reported_checkpoints()]
        for step in range(manager.count + 1, config["steps"] + 1):
            loss = sum(backward(net, BATCHES * step + part) for part in range(rank, BATCHES, size))
            optimizer.step()
            optimizer.zero_grad()
            total = torch.tensor(loss / BATCHES)
            dist.all_reduce(total)
            losses[step] = total.item()
            if step == config["request_at"]:
                manager.request_save()
            if manager.should_save(step):
                killed = Path(config["directory"], "killed")
                dies = step == config["kill_at"] and rank == 1 and not killed.exists()
                manager.wait()  # the save before
                with killed_in_save() if dies else contextlib.nullcontext():
                    tc_ray.report({"loss": losses[step]}, manager, step, tc.training.state(net, optimizer))
                    if dies:
                        killed.touch()
                        wait_for_shard_of_rank_0(f"step_{step:08}")
    weights: dict[str, Any] = net.state_dict()
    outcome = {
        "weights": {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in weights.items()},
        "losses": losses,
        "resumed_from": found.step if found else 0,
        "known": known,
        "refusals": refusals(config["directory"]),
    }
    torch.save(outcome, Path(config["directory"], f"outcome-{rank}.pt"))


def refusals(directory: str) -> list[str]:
    """Returns the errors of a manager with a policy of its own, and of one of another run."""
    found: list[str] = []
    elsewhere = tc.Manager(Path(directory, "elsewhere"), background=False)
    for call in (lambda: tc_ray.manager(keep=3), lambda: tc_ray.report({"loss": 0.0}, elsewhere, 1, {"step": 1})):
        try:
            call()
        except tc.TreeckptError as error:
            found.append(str(error))
    return found


def backward(net: torch.nn.Module, position: int) -> float:
    """Adds the gradients of a part of a step's data, as the mean over all parts; returns its loss."""
    data = torch.rand(8, 16, generator=torch.Generator().manual_seed(position))
    loss = net(data).square().mean()
    # FSDP divides by the number of workers itself
    (loss * dist.get_world_size() / BATCHES).backward()
    return loss.item()


def wait_for_shard_of_rank_0(name: str) -> None:
    storage: Any = ray.train.get_context().get_storage()
    there = pyarrow.fs.FileSelector(f"{storage.experiment_fs_path}/{name}", allow_not_found=True)
    while not any("/shard-00000-of-00002." in one.path for one in storage.storage_filesystem.get_file_info(there)):
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("workers", type=int)
    parser.add_argument("--kill-at", type=int, help="the step whose save rank 1 does not survive")
    parser.add_argument("--request-at", type=int, help="the step at which a save is requested")
    parser.add_argument("--storage", help="of Ray, instead of the directory: the URL of a bucket")
    parser.add_argument("--failures", type=int, default=0, help="after which Ray starts the workers again")
    options = parser.parse_args()
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    if options.workers > 1:
        cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={**vars(options), "directory": str(options.directory)},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=options.storage or str(options.directory),
            failure_config=ray.train.FailureConfig(max_failures=options.failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    report = {"latest": result.checkpoint.path, "metrics": result.metrics}
    (options.directory / "result.json").write_text(json.dumps(report))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
