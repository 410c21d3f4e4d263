"""Conversions by several ranks: they share the bytes, and agree on how it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import treeckpt as tc

from .registry import Rank, case


def _state() -> dict[str, Any]:
    tensors = {f"w{n}": torch.arange(n, n + 200_000, dtype=torch.float32) for n in range(6)}
    return {"model": tensors, "step": 3, "names": {"a", "b", "c", 4}}


@case("two")
def ranks_share_a_conversion_through_all_formats(here: Rank) -> None:
    start = here.directory / "convert.pt"
    if here.rank == 0:
        torch.save(_state(), start)
    dist.barrier()
    before = start
    for name, to in (("c1", "treeckpt"), ("c2", "dcp"), ("c3", "torch")):
        after = here.directory / f"convert {name}"
        report = tc.convert.convert(before, after, to=to)
        shares: list[Any] = [None] * here.world
        dist.all_gather_object(shares, report.written_nbytes)
        assert sum(shares) == 6 * 800_000 and max(shares) <= 4 * 800_000, shares
        before = after
    assert torch.load(before)["names"] == _state()["names"]
    found, wanted = torch.load(before)["model"], _state()["model"]
    assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


@case("two")
def a_conversion_that_only_one_rank_can_do_fails_on_all(here: Rank) -> None:
    torch.save(_state(), here.directory / f"own {here.rank}.pt")
    exclude = ["model/w3"] if here.rank else []
    with pytest.raises(tc.MismatchError, match="same conversion on every rank"):
        tc.convert.to_dcp(here.directory / f"own {here.rank}.pt", here.directory / "never", exclude=exclude)
    dist.barrier()
    assert not (here.directory / "never").exists() and not list(here.directory.glob(".never*"))


@case("two")
def a_damaged_entry_that_no_rank_reads_as_a_whole_is_named_on_all(here: Rank) -> None:
    start = here.directory / "damaged.pt"
    tensor = torch.arange(1_000_000, dtype=torch.float32)
    if here.rank == 0:
        torch.save({"w": tensor, "v": torch.ones(5)}, start)
        data = bytearray(start.read_bytes())
        data[data.index(tensor.numpy().tobytes()) + 3_000_000] ^= 1
        start.write_bytes(data)
    dist.barrier()
    for to in ("treeckpt", "torch"):
        with pytest.raises(tc.RankError, match=r"w: .*CRC-32 .* of the entry"):
            tc.convert.convert(start, here.directory / f"undamaged {to}", to=to)
        dist.barrier()
        assert not list(here.directory.glob("undamaged*/index.json"))
    tc.convert.convert(start, here.directory / "rest of it", exclude="w")
