"""The entry point of the command line: parses the arguments and runs a command; with `dashboard` and `completion`.

A `TreeckptError` is printed as one message, without a traceback. No module of this package imports torch; the demo
does, in processes of its own.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .._io.os_errors import hint_for
from .._io.storage.foreign_formats import describe_foreign
from .._io.storage.local_files import FOLLOW_LINKS
from .._report.terminal import fail
from ..errors import CheckpointNotFound, StoreError, TreeckptError
from . import convert, diff, runs, show, verify
from .command import EXIT_CODES, Commands, in_options, no_such_run, usage_error

_SCRIPT = """\
_treeckpt() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{names}"
    else
        case "${{COMP_WORDS[1]}} $before" in
{choices}
        *) case "${{COMP_WORDS[1]}} $current" in
{options}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _treeckpt treeckpt"""
_BASH_IN_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_EPILOG = """\
for a start:
  treeckpt demo                          a training on 4 ranks, and its run in the browser
  treeckpt ls RUN                        the checkpoints of a run
  treeckpt show CKPT [PATH]              the tree of one, or one leaf of it
  treeckpt verify CKPT                   whether every byte is as it was saved
  treeckpt dashboard RUN                 all of it in the browser
RUN and CKPT are directories or URLs. treeckpt COMMAND --help lists the options of a command.

"""


def add_completion(commands: Commands) -> None:
    """Adds `completion`, for the commands that were added before and for itself."""
    text = 'print what lets a shell complete commands: eval "$(treeckpt completion bash)" in its start file'
    parser = commands.add("completion", partial(_completion, commands), text, json=False)
    parser.add_argument("shell", choices=("bash", "zsh"))


def _completion(commands: Commands, options: argparse.Namespace) -> int:
    print((_BASH_IN_ZSH if options.shell == "zsh" else "") + _script(commands.parsers))
    return 0


def _script(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    choices, options = list[str](), list[str]()
    for name, parser in parsers.items():
        flags = " ".join(flag for action in parser._actions for flag in action.option_strings)
        options.append(f'            "{name} -"*) words="{flags}" ;;')
        choices += [f'        "{name} {before}") words="{words}" ;;' for before, words in _choices(name, parser)]
    return _SCRIPT.format(names=" ".join(parsers), choices="\n".join(choices), options="\n".join(options))


def _choices(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Gives the words that may stand behind an option, or behind the command itself."""
    for action in parser._actions:
        if action.choices is not None:
            for before in action.option_strings or [name]:
                yield before, " ".join(map(str, action.choices))


def add_dashboard(commands: Commands) -> None:
    """Adds `dashboard`."""
    parser = commands.add("dashboard", _dashboard, "browse runs in a web browser")
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a run, a folder of runs, a checkpoint, or one of another program: a directory or a file",
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
        # What was imported stays to the end: later collections need not look at it.
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
        else:
            os.environ[FOLLOW_LINKS] = before


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
    runs.add_ls(commands)
    show.add_show(commands)
    verify.add_verify(commands)
    diff.add_diff(commands)
    verify.add_rebuild_index(commands)
    verify.add_flatten(commands)
    runs.add_commands(commands)
    convert.add_commands(commands)
    add_dashboard(commands)
    commands.add("demo", _unreachable, "train on 4 ranks, save, load on 2 and on 1, and browse the run", json=False)
    text = "measure saves and loads beside the disk's limits and other libraries"
    commands.add("bench", _unreachable, text, json=False)
    add_completion(commands)
    return parser


def _unreachable(options: argparse.Namespace) -> int:
    raise AssertionError("main runs the demo and the benchmark before it parses")


if __name__ == "__main__":
    sys.exit(main())
