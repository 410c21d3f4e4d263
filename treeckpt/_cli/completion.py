"""The command `completion`: prints a script by which bash or zsh complete commands, options and their choices."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import partial

from .command import Commands

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
