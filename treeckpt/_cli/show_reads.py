"""The part `--mesh` of the command `show`: what each rank of a layout reads, by the planner of loads."""

from __future__ import annotations

import argparse

import msgspec

from .._core.columns import bytes_column
from .._core.text import bytes_text
from .._loading.reshard_plan import SAVED, ReshardPlan, parse_target, plan_reshard
from .._loading.run_load import opened
from .._report.terminal import print_facts, print_json, print_line, print_table

MAX_FILES = 4
"""Files of one rank that are named."""


MESH = f"show what each rank of a mesh, as 2x4, would read of which file, or of the save ({SAVED})"
"""The help of `--mesh`."""


def add_reads(show: argparse.ArgumentParser) -> None:
    """Adds the options that go with `--mesh`."""
    show.add_argument("--names", default="", help="with --mesh: names of its dimensions, as dp,tp")
    place = "with --mesh: rules, as '*.bias: Replicate; *: Shard(0)', or globs of what is loaded as saved"
    show.add_argument("--place", metavar="RULES", default="", help=place)


def show_reads(options: argparse.Namespace) -> int:
    """Prints what each rank reads."""
    target = parse_target(options.mesh, options.names, options.place)
    with opened(options.checkpoint) as checkpoint:
        plan = plan_reshard(checkpoint, target)
    if options.json:
        totals = {name: getattr(plan, name) for name in ("held", "read", "amplification", "imbalance")}
        print_json({**msgspec.structs.asdict(plan), **totals})
        return 0
    holds, reads = bytes_column([rank.nbytes for rank in plan.ranks]), bytes_column([rank.read for rank in plan.ranks])
    rows = [
        (
            f"rank {rank.rank}",
            holds(rank.nbytes),
            reads(rank.read),
            f"{rank.amplification:.2f}x",
            f"{rank.reads:,}",
            _files_text(rank.files),
        )
        for rank in plan.ranks
    ]
    print_facts(_totals(plan))
    print_line("")
    print_table(
        ("", "holds", "reads", "amplification", "requests", "files"),
        rows,
        right=("holds", "reads", "amplification", "requests"),
    )
    return 0


def _files_text(files: tuple[tuple[int, int], ...]) -> str:
    more = f"+{len(files) - MAX_FILES}" if len(files) > MAX_FILES else ""
    return ",".join([*(f"{number}" for number, _ in files[:MAX_FILES]), *([more] if more else [])])


def _totals(plan: ReshardPlan) -> list[tuple[str, str]]:
    planned = f"{len(plan.ranks)} of {plan.world}, spread evenly" if len(plan.ranks) < plan.world else f"{plan.world}"
    facts = [
        ("ranks", planned),
        ("hold", f"{bytes_text(plan.held)} of {plan.arrays} arrays"),
        ("read", f"{bytes_text(plan.read)}, {plan.amplification:.2f}x of what they hold"),
    ]
    notes = {
        "replicated, as they lack a dimension": plan.whole,
        "match no rule": plan.unmatched,
        "left out: ties, long values, or each rank's own": plan.left_out,
        "counted on the rank that wrote each piece": plan.listed,
        "tables cut evenly, not by buckets": plan.tables,
    }
    return facts + [(name, f"{count}") for name, count in notes.items() if count]
