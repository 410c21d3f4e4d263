"""The command `dashboard`: serves the web dashboard."""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

from .._io.storage.foreign_formats import describe_foreign
from .command import Commands, no_such_run, usage_error


def add_dashboard(commands: Commands) -> None:
    """Adds `dashboard`."""
    parser = commands.add("dashboard", _dashboard, "browse runs in a web browser")
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="a run, a checkpoint, or one of another program: a directory or a file"
    )
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


def _dashboard(options: argparse.Namespace) -> int:
    files = [run for run in options.runs if Path(run).is_file() and describe_foreign(run)]
    if problem := next(filter(None, (no_such_run(run) for run in options.runs if run not in files)), ""):
        return usage_error(problem)
    gc.disable()  # imports create no garbage, and collections take a tenth of the start
    try:
        from treeckpt_dashboard.web.server import ServeError, announce_json, serve
    except ModuleNotFoundError as error:
        return usage_error(f"the dashboard needs {error.name}; install it with: pip install 'treeckpt[dashboard]'")
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
            started=announce_json if options.json else None,
        )
    except ServeError as error:
        return usage_error(str(error))
