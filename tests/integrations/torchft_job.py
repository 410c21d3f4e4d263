"""Trains with torchft, each rank a replica group of its own; one of them saves to a `Manager`, and all resume from it.

The first rank also runs torchft's lighthouse.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft
from torchft.coordination import LighthouseServer

import treeckpt as tc
from tests.helpers import framework_job as job


def lighthouse(replicas: int) -> tuple[LighthouseServer | None, dist.TCPStore, str]:
    """Returns the server, on the first rank, the store through which the others learn its address, and that."""
    first = os.environ["RANK"] == "0"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    server = LighthouseServer(bind="[::]:0", min_replicas=replicas, join_timeout_ms=60_000) if first else None
    if server is not None:
        store.set("lighthouse", server.address())
    return server, store, store.get("lighthouse").decode()


def main() -> None:
    arguments, rank, replicas = job.arguments(), os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    server, everyone, address = lighthouse(replicas)
    group_store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    net = job.network()
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    ft = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: (net.load_state_dict(state["model"]), adam.load_state_dict(state["optimizer"])),
        state_dict=lambda: {"model": net.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=replicas,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=group_store.port,
        lighthouse_addr=address,
        replica_id=f"replica-{rank}",
    )
    model, optimizer = torchft.DistributedDataParallel(ft, net), torchft.Optimizer(ft, adam)
    losses: dict[int, float] = {}
    # each replica group has a manager of its own; that whose rank is 0 among those that take part saves
    with tc.Manager(arguments.directory / "run", comm="alone") as manager:
        manager.register_value("torchft", ft.state_dict, ft.load_state_dict)
        manager.resume(net, adam)
        while ft.current_step() < arguments.steps:
            step = ft.current_step()
            optimizer.zero_grad()
            loss = model(job.numbers(step)).square().mean()
            losses[step] = loss.item()
            loss.backward()
            optimizer.step()
            if ft.current_step() % 2 == 0 and ft.participating_rank() == 0:
                killed = ft.current_step() == arguments.kill_at
                if killed:
                    manager.wait()
                with job.killed_in_save() if killed else nullcontext():
                    manager.save(ft.current_step(), tc.training.state(net, adam))
    torch.save({"losses": losses, "weights": net.state_dict()}, arguments.directory / f"outcome-{rank}.pt")
    everyone.add("done", 1)
    while server is not None and everyone.add("done", 0) < replicas:
        time.sleep(0.1)
    ft.shutdown(wait=False)


if __name__ == "__main__":
    main()
