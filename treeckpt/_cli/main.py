"""The entry point of the command line: parses the arguments and runs a command.

A `TreeckptError` is printed as one message, without a traceback. No module of this package imports torch; the demo
does, in processes of its own.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from .._io.os_errors import hint_for
from .._io.storage.local_files import FOLLOW_LINKS
from .._report.terminal import fail
from ..errors import CheckpointNotFound, StoreError, TreeckptError
from . import completion, convert, dashboard, diff, export, listing, runs, show, verify
from .command import EXIT_CODES, Commands, in_options, usage_error

_EPILOG = """\
for a start:
  treeckpt demo                          a training on 4 ranks, and its run in the browser
  treeckpt ls RUN                        the checkpoints of a run
  treeckpt show CKPT [PATH]              the tree of one, or one leaf of it
  treeckpt verify CKPT                   whether every byte is as it was saved
  treeckpt dashboard RUN                 all of it in the browser
RUN and CKPT are directories or URLs. treeckpt COMMAND --help lists the options of a command.

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:  # it parses its own options
        try:
            from .. import demo
        except ModuleNotFoundError as error:
            return usage_error(f"the demo needs {error.name}; install it with: pip install 'treeckpt[all]'")
        return demo.main(arguments[1:])
    if arguments[:1] == ["bench"]:  # so does this
        from .. import _bench

        return _bench.main(arguments[1:])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what its encoding lacks, as on the error stream
    parser = new_parser()
    if not arguments:
        parser.print_help()
        return 0
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # with the usage of the command
    before = os.environ.get(FOLLOW_LINKS)
    if getattr(options, "follow_links", False):
        os.environ[FOLLOW_LINKS] = "1"  # for the processes that it starts too
    try:
        return options.run(options)
    except TreeckptError as error:
        if isinstance(error, CheckpointNotFound) and (problem := runs.no_checkpoint(options)):
            return usage_error(problem)
        fail(f"treeckpt: {in_options(f'{error}', options)}")
        return getattr(options, "unread_code", 1) if isinstance(error, StoreError) else 1
    except BrokenPipeError:  # the reader of the output has closed it: print nothing more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        fail(f"treeckpt: {error}. {hint_for(error)}")
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if before is None:
            os.environ.pop(FOLLOW_LINKS, None)


def new_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    try:
        installed = version("treeckpt")
    except PackageNotFoundError:
        installed = "(not installed)"
    parser = argparse.ArgumentParser(
        "treeckpt",
        description="Checkpoints of any tree, from any layout into any other.",
        epilog=f"{_EPILOG}{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"treeckpt {installed}")
    commands = Commands(parser)
    listing.add_ls(commands)
    show.add_show(commands)
    verify.add_verify(commands)
    diff.add_diff(commands)
    verify.add_rebuild_index(commands)
    runs.add_commands(commands)
    convert.add_convert(commands)
    export.add_commands(commands)
    dashboard.add_dashboard(commands)
    commands.add("demo", _unreachable, "train on 4 ranks, save, load on 2 and on 1, and browse the run", json=False)
    text = "measure saves and loads beside the disk's limits and other libraries"
    commands.add("bench", _unreachable, text, json=False)
    completion.add_completion(commands)
    return parser


def _unreachable(options: argparse.Namespace) -> int:
    raise AssertionError("main runs the demo and the benchmark before it parses")


if __name__ == "__main__":
    sys.exit(main())
