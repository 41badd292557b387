"""`energynn completion SHELL`: a script by which bash, zsh or fish complete commands, actions and options."""

from __future__ import annotations

import argparse
import shlex

from energynn.cli.options import add_command

# In both, <words> is a table from what was typed, as "energynn forecast plan", to what may follow.
BASH = """\
declare -A _energynn_words=(
<words>)
_energynn() {
  local at=energynn i
  for ((i = 1; i < COMP_CWORD; i++)); do
    [[ -n ${_energynn_words[$at ${COMP_WORDS[i]}]+x} ]] && at="$at ${COMP_WORDS[i]}"
  done
  COMPREPLY=($(compgen -W "${_energynn_words[$at]}" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _energynn energynn
"""
ZSH = """\
#compdef energynn
typeset -gA _energynn_words
_energynn_words=(
<words>)
_energynn() {
  local at=energynn i
  for ((i = 2; i < CURRENT; i++)); do
    (( ${+_energynn_words[$at ${words[i]}]} )) && at="$at ${words[i]}"
  done
  compadd -- ${=_energynn_words[$at]} || _files
}
compdef _energynn energynn
"""


def add_completion(commands) -> None:
    text = "print a script by which a shell completes commands and options"
    parser = add_command(commands, completion, text, 'eval "$(energynn completion bash)"')
    parser.add_argument(
        "shell", choices=["bash", "zsh", "fish"], help="the shell; put the example's line in its rc file"
    )
    parser.set_defaults(commands=commands)


def completion(options) -> int:
    words = {"energynn": sorted(options.commands.choices) + ["--help", "--version"]}
    for name, parser in options.commands.choices.items():
        words |= _words_after(f"energynn {name}", parser)
    if options.shell == "fish":
        print("\n".join(_fish(words)))
        return 0
    form, template = ("[{}]={}", BASH) if options.shell == "bash" else ("{} {}", ZSH)
    lines = [form.format(shlex.quote(typed), shlex.quote(" ".join(known))) for typed, known in words.items()]
    print(template.replace("<words>", "\n".join(lines)), end="")
    return 0


def _words_after(typed: str, parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """What may follow a command, and each of the actions below it."""
    words, below = [], {}
    for action in parser._actions:
        words += [name for name in action.option_strings if name.startswith("--")]
        words += sorted(action.choices or []) if not action.option_strings else []
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                below |= _words_after(f"{typed} {name}", child)
    return {typed: words} | below


def _fish(words: dict[str, list[str]]) -> list[str]:
    """A line for each place: fish offers the words where all of its commands were typed."""
    lines = []
    for typed, known in words.items():
        commands = typed.split()[1:]
        seen = "; and ".join(f"__fish_seen_subcommand_from {command}" for command in commands)
        where = seen or "__fish_use_subcommand"
        lines.append(f"complete -c energynn -n {shlex.quote(where)} -a {shlex.quote(' '.join(known))}")
    return lines
