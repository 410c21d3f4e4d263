"""The command line: what is in a run, what is in a checkpoint, is it intact, in what do two differ.

Exit codes: 0 fine, 1 the checkpoint is bad, 2 the command was used wrongly. An error of ours is one message, without a
traceback. Nothing here imports torch; the demo does, in processes of its own.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..api import opened
from ..core.analysis.diff import Added, Diff, Moved, Removed, diff, leaf_text
from ..core.analysis.outline import Outline, OutlineRow
from ..core.format.byte_map import layout_of, locate_chunks
from ..core.format.records import AliasRecord, Index, Leaf, PerRankArrays, PerRankValues, ValueRecord
from ..core.sharding.int_runs import length_of
from ..core.text import (
    bytes_text,
    layout_text,
    region_text,
    seconds_text,
    shape_text,
    time_text,
    value_text,
    value_type,
)
from ..errors import CheckpointNotFound, TreeckptError
from ..loading.compare import Side, ValueChange, value_changes
from ..report.terminal import fail, print_facts, print_json, print_line, print_table
from ..runs import catalog
from ..runs.active_saves import under_way_text
from . import convert, export, runs, verify
from .rules import show_rules

__all__ = ["main"]

MAX_ROWS = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:  # its options are its own
        return _demo(arguments[1:])
    if arguments[:1] == ["bench"]:  # so are these
        return _bench(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except TreeckptError as error:
        if isinstance(error, CheckpointNotFound) and (problem := runs.no_checkpoint(options)):
            return _usage(problem)
        fail(f"treeckpt: {error}")
        return 1
    except BrokenPipeError:  # the reader of our output has gone: nothing more is wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("treeckpt", description="Checkpoints of any tree, from any layout into any other.")
    parser.add_argument("--version", action="version", version=f"treeckpt {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[Any], int], text: str, *, json: bool = True) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        made.set_defaults(run=run)
        if json:
            made.add_argument("--json", action="store_true", help="print JSON")
        return made

    ls = command("ls", _ls, "list the checkpoints of a run")
    ls.add_argument("runs", metavar="RUN", nargs="+")
    show = command("show", _show, "show what a checkpoint holds, or one part of it")
    show.add_argument("checkpoint", metavar="CKPT")
    show.add_argument("leaf", metavar="PATH", nargs="?", default="", help="of a leaf or of a node of the tree")
    show.add_argument("--rules", metavar="FILE", help="show what load rules (JSON, or statements) make of it")
    show.add_argument("--depth", type=int, default=2, help="levels of the tree to print (default: 2)")
    verify.add_verify(command)
    two = command("diff", _diff, "say in what two checkpoints differ, by their indexes or by every number")
    two.add_argument("--values", action="store_true", help=_VALUES)
    two.add_argument("first", metavar="A")
    two.add_argument("second", metavar="B")
    rebuild = command("rebuild-index", _rebuild_index, "make a lost index.json again from the shards")
    rebuild.add_argument("checkpoint", metavar="CKPT")
    rebuild.add_argument("--replace", action="store_true", help="even where there is an index")
    runs.add_commands(command)
    convert.add_convert(command)
    export.add_commands(command)
    _add_dashboard(command("dashboard", _dashboard, "browse runs in a web browser", json=False))
    command("demo", _passed_on, "train on 4 ranks, save, load on 2 and on 1, and browse the run", json=False)
    command("bench", _passed_on, "measure saves and loads beside the disk's limits and other libraries", json=False)
    return parser


def _add_dashboard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8265, help="0 takes a free one (default: 8265)")
    parser.add_argument(
        "--token",
        nargs="?",
        const="",
        help="demand this token; without a value, $TREECKPT_TOKEN or a random one. A must beyond loopback",
    )
    parser.add_argument("--root-path", default="", help="the path under which a proxy serves it")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="accept this Host header too, e.g. a proxy's"
    )
    parser.add_argument(
        "--keep",
        default="",
        metavar="POLICIES",
        help="what the runs are kept by, e.g. 'last:3 every:1000 best:loss:min:2'",
    )
    parser.add_argument("--cache", metavar="DIR", help="its own files (default: $TREECKPT_CACHE or the user's cache)")


def _version() -> str:
    try:
        return version("treeckpt")
    except PackageNotFoundError:
        return "(not installed)"


def _usage(text: str) -> int:
    fail(f"treeckpt: {text}")
    return 2


# ls and show ------------------------------------------------------------------------------------------------------


def _ls(options: argparse.Namespace) -> int:
    if missing := [run for run in options.runs if not catalog.run_exists(run)]:
        return _usage(f"{missing[0]}: no such directory")
    found = [info for run in options.runs for info in catalog.scan(run)]
    if options.json:
        print_json(found)
        return 0
    if not found:
        print_line("no checkpoints")
        return 0
    columns = ("name", "status", "step", "size", "leaves", "ranks", "saved", "took")
    rows = [
        (
            info.name,
            info.state,
            _or_dash(info.step),
            bytes_text(info.nbytes) if info.nbytes is not None else "-",
            _or_dash(info.leaves),
            _or_dash(info.world),
            time_text(info.created_ns, None),
            seconds_text(info.seconds) if info.seconds is not None else "-",
        )
        for info in found
    ]
    print_table(columns, rows, right=("step", "size", "leaves", "ranks", "took"))
    for info in found:
        if info.error and info.status != "foreign":
            print_line(f"{info.name}: {info.error}", "dim")
        _print_saving(info)
    return 0


def _print_saving(info: catalog.CheckpointInfo) -> None:
    for save in info.saving:
        print_line(f"{info.name}: {under_way_text(save, time.time_ns())}", "yellow")


def _or_dash(number: int | None) -> str:
    return "-" if number is None else f"{number}"


def _show(options: argparse.Namespace) -> int:
    import treeckpt as tc

    info = catalog.read_info(options.checkpoint, follow=True)
    if info.status == "partial" and not options.json:
        _print_saving(info)
    index = tc.inspect(options.checkpoint)
    if options.rules:
        return show_rules(index, options)
    outline = Outline(index)
    row = outline.node_at(options.leaf)
    if row is None:
        fail(f"treeckpt: {options.leaf}: no such path in {options.checkpoint}")
        for leaf in outline.search(options.leaf.rpartition("/")[2], count=5)[0]:
            fail(f"  there is {leaf.path}")
        return 2
    if row.kind == "leaf":
        return _show_leaf(index, index.entries[row.first], options)
    rows = _rows_below(outline, row, options.depth)
    if options.json:
        print_json({**_summary(index), "pinned": info.pinned, "saving": info.saving, "rows": rows})
        return 0
    if not options.leaf:
        print_facts([(name, str(fact)) for name, fact in _summary_texts(index)] + [("pinned", "yes")] * info.pinned)
        _print_saving(info)
        print_line("")
    depth = options.leaf.count("/") + bool(options.leaf)
    texts = [_row_texts(index, r, r.node.count(".") + 1 - depth) for r in rows]
    print_table(("path", "is", "leaves", "size"), texts, right=("leaves", "size"))
    return 0


def _summary(index: Index) -> dict[str, Any]:
    return {
        "save_id": index.save_id,
        "step": index.step,
        "created_ns": index.created_ns,
        "world": index.world,
        "leaves": len(index.leaves),
        "nbytes": index.nbytes,
        "files": len(index.file_list),
        "metadata": index.metadata,
    }


def _summary_texts(index: Index) -> list[tuple[str, object]]:
    return [
        ("step", index.step),
        ("saved", time_text(index.created_ns, None)),
        ("save id", index.save_id),
        ("ranks", index.world),
        ("leaves", len(index.leaves)),
        ("size", f"{bytes_text(index.nbytes)} in {len(index.file_list)} shards"),
        *((f"metadata {name}", value_text(value)) for name, value in index.metadata.items()),
    ]


def _rows_below(outline: Outline, row: OutlineRow, depth: int) -> list[OutlineRow]:
    found, waiting = list[OutlineRow](), [(row, 0)]
    while waiting and len(found) <= MAX_ROWS:
        node, level = waiting.pop()
        found.append(node)
        if level < max(depth, 1):
            waiting += [(child, level + 1) for child in reversed(outline.children(node.node, count=MAX_ROWS))]
    return found[1:]


def _row_texts(index: Index, row: OutlineRow, level: int) -> tuple[str, str, str, str]:
    what = leaf_text(index, index.entries[row.first]) if row.kind == "leaf" else row.cls or row.kind
    size = bytes_text(row.nbytes) if row.nbytes else ""
    return "  " * max(0, level - 1) + row.key, what, "" if row.kind == "leaf" else f"{row.leaves}", size


def _show_leaf(index: Index, leaf: Leaf, options: argparse.Namespace) -> int:
    chunks = locate_chunks(index, leaf)
    if options.json:
        layout = layout_of(index, leaf)
        print_json({"path": leaf.path, "record": leaf.record, "spec": leaf.spec, "layout": layout, "chunks": chunks})
        return 0
    print_facts(_leaf_facts(index, leaf))
    if chunks:
        print_line("")
        rows = [
            (region_text(c.region), f"{c.rank}", c.file.name, f"{c.start}:{c.stop}", bytes_text(c.stop - c.start))
            for c in chunks[:MAX_ROWS]
        ]
        print_table(("region", "rank", "file", "bytes", "size"), rows, right=("rank", "size"))
        if len(chunks) > MAX_ROWS:
            print_line(f"... and {len(chunks) - MAX_ROWS} more; --json gives all")
    return 0


def _leaf_facts(index: Index, leaf: Leaf) -> list[tuple[str, str]]:
    facts = [("path", leaf.path)]
    record = leaf.record
    if isinstance(record, ValueRecord):
        return [*facts, ("type", value_type(record.value)), ("value", value_text(record.value, 2000))]
    if isinstance(record, PerRankValues):
        return [*facts, ("values", f"one for each of {len(record.values)} ranks: {leaf_text(index, leaf)}")]
    assert leaf.spec is not None, "only values have no spec"
    facts += [("dtype", leaf.spec.dtype), ("shape", shape_text(leaf.spec.shape)), ("kind", leaf.spec.kind)]
    if isinstance(record, AliasRecord):
        return [*facts, ("shares", f"the storage of {index.entries[record.of].path}")]
    if isinstance(record, PerRankArrays):
        return [*facts, ("layout", f"one for each of {length_of(leaf.ranks or ())} ranks")]
    return [*facts, ("layout", layout_text(layout_of(index, leaf)))]


# diff, rebuild -----------------------------------------------------------------------------------------------------


def _diff(options: argparse.Namespace) -> int:
    with opened(options.first) as one, opened(options.second) as two:
        a, b = Side(one), Side(two)
        found = diff(a.index, b.index)
        values = list(value_changes(a, b, found)) if options.values else None
    if options.json:
        compared = {"changes": found.changes, "same": found.same, "values": values, "equal_by": "recorded checksums"}
        print_json(found if values is None else compared)
        return 0
    rows = _diff_rows(found) + [("content", v.path, "", _delta_text(v)) for v in values or ()]
    print_table(("what", "path", "before", "after"), rows) if rows else None
    counts = Counter(row[0] for row in rows)
    changed = {change.path for change in found.changes}
    alike = found.same - sum(v.path not in changed for v in values or ())
    parts = [f"{n} {what}" for what, n in counts.most_common()] + [
        f"{alike} {'leaf' if alike == 1 else 'leaves'} alike"
    ]
    print_line(f"{', '.join(parts)} ({_NOT_COMPARED if values is None else _BY_CHECKSUMS})", "dim")
    return 0


_VALUES = """compare contents too: by the checksums recorded when they were saved, number by number where these differ;
whether bytes were damaged since says `treeckpt verify`"""
_NOT_COMPARED = "the contents of arrays are not compared without --values"
_BY_CHECKSUMS = "contents too, by their recorded checksums; treeckpt verify compares these with the bytes"


def _delta_text(change: ValueChange) -> str:
    delta = change.delta
    assert delta is not None, "every difference was measured"
    text = f"{delta.changed} of {delta.elements} differ"
    if delta.max_abs is not None and delta.mean_abs is not None:
        text += f", at most by {delta.max_abs:.6g}, by {delta.mean_abs:.6g} in the mean"
    return text + (f", {delta.not_finite} of them not finite" if delta.not_finite else "")


def _diff_rows(found: Diff) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, str, str, str]] = []
    for change in found.changes:
        if isinstance(change, Added):
            rows.append(("added", change.path, "", change.leaf))
        elif isinstance(change, Removed):
            rows.append(("removed", change.path, change.leaf, ""))
        elif isinstance(change, Moved):
            rows.append(("moved", change.path, "", change.to))
        else:
            rows.append((change.aspect, change.path, change.before, change.after))
    return rows


def _rebuild_index(options: argparse.Namespace) -> int:
    import treeckpt as tc

    index = tc.rebuild_index(options.checkpoint, replace=options.replace)
    if options.json:
        print_json(_summary(index))
    else:
        print_line(
            f"{options.checkpoint}: index.json made again, {len(index.leaves)} leaves, {bytes_text(index.nbytes)}"
        )
    return 0


# dashboard and demo -------------------------------------------------------------------------------------------------


def _dashboard(options: argparse.Namespace) -> int:
    if missing := [run for run in options.runs if not catalog.run_exists(run)]:
        return _usage(f"{missing[0]}: no such directory")
    gc.disable()  # nothing of what is imported is garbage: to look through it takes a tenth of the start
    try:
        from treeckpt_dashboard.server import ServeError, serve
    except ModuleNotFoundError as error:
        return _usage(f"the dashboard needs {error.name}; install it with: pip install 'treeckpt[dashboard]'")
    finally:
        gc.freeze()
        gc.enable()
    try:
        return serve(
            options.runs,
            host=options.host,
            port=options.port,
            token=options.token if options.token != "" else os.environ.get("TREECKPT_TOKEN", ""),
            root_path=options.root_path,
            allowed_hosts=options.allow_host,
            cache=options.cache,
            keep=options.keep,
        )
    except ServeError as error:
        return _usage(str(error))


def _demo(arguments: Sequence[str]) -> int:
    try:
        from .. import demo
    except ModuleNotFoundError as error:
        return _usage(f"the demo needs {error.name}; install it with: pip install 'treeckpt[all]'")
    return demo.main(arguments)


def _bench(arguments: Sequence[str]) -> int:
    from .. import bench

    return bench.main(arguments)


def _passed_on(options: argparse.Namespace) -> int:
    raise AssertionError("main passes the arguments of the demo and the benchmark on before it parses")


if __name__ == "__main__":
    sys.exit(main())
