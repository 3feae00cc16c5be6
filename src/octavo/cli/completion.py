"""`octavo completion SHELL`: a script that completes commands, options, keys of training and their values."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

__all__ = ["SHELLS", "run"]


@dataclasses.dataclass(frozen=True)
class _Words:
    """What can be typed: commands with a sentence each, the options of each, and keys with the values they take.

    `keyed` commands take keys, `closed` ones no file.
    """

    commands: dict[str, str]
    options: dict[str, dict[str, str]]
    keyed: tuple[str, ...]
    closed: tuple[str, ...]
    keys: dict[str, tuple[str, ...]]


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the script for a shell and return the exit status."""
    print(SHELLS[args.shell](_words(parser)), end="")
    return 0


def _words(parser: argparse.ArgumentParser) -> _Words:
    """Read off the parser and the configuration, so that nothing has to be kept in step by hand."""
    commands: Any = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    sentences = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    options = {
        name: {flag: action.help or "" for action in sub._actions for flag in action.option_strings if flag[:2] == "--"}
        | {value: "" for action in sub._actions if not action.option_strings for value in action.choices or ()}
        for name, sub in commands.choices.items()
    }
    # Those that print their own help take key=value words.
    keyed = tuple(name for name, sub in commands.choices.items() if not sub.add_help)
    closed = tuple(
        name for name, sub in commands.choices.items() if name not in keyed and not any(map(_open, sub._actions))
    )
    return _Words(sentences, options, keyed, closed, _keys())


def _open(action: argparse.Action) -> bool:
    """Whether any word can follow, so that it may be a file."""
    return action.nargs != 0 and action.choices is None


def _keys() -> dict[str, tuple[str, ...]]:
    from octavo.rules import recipes
    from octavo.train.config import Config, keys

    found = {name: tuple(str(choice) for choice in key.choices if choice != "") for name, key in keys().items()}
    found |= {field.name: ("true", "false") for field in dataclasses.fields(Config) if field.type is bool}
    return found | {"quantization": recipes(aliases=True)}


def _bash(words: _Words) -> str:
    lines = [f"    {name}) words='{' '.join(options)}' ;;" for name, options in words.options.items()]
    keys = " ".join(f"{key}=" for key in words.keys)
    values = [f"    {key}) words='{' '.join(values)}' ;;" for key, values in words.keys.items() if values]
    return f"""\
# octavo completion bash >> ~/.bash_completion
_octavo() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} key= words=
  # Bash takes `=` for a word of its own.
  if [[ $cur == = ]]; then
    key=${{COMP_WORDS[COMP_CWORD - 1]}} cur=
  elif [[ ${{COMP_WORDS[COMP_CWORD - 1]}} == = ]]; then
    key=${{COMP_WORDS[COMP_CWORD - 2]}}
  fi
  if [[ -n $key ]]; then
    case $key in
{chr(10).join(values)}
    esac
  elif [[ $COMP_CWORD -eq 1 ]]; then
    words='{" ".join(words.commands)} --help --version'
  else
    case ${{COMP_WORDS[1]}} in
    {"|".join(words.keyed)}) words='{keys} --help' ;;
{chr(10).join(line for line in lines if line.split(")")[0].strip() not in words.keyed)}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  if [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}}
complete -o default -F _octavo octavo
"""


def _quoted(text: str) -> str:
    """Between single quotes, on one line, for zsh and fish."""
    return "'" + " ".join(text.split()).replace("%%", "%").replace("\\", "").replace("'", '"').replace(":", ";") + "'"


def _zsh(words: _Words) -> str:
    commands = " ".join(_quoted(name)[:-1] + ":" + _quoted(text)[1:] for name, text in words.commands.items())
    plain = [
        f"    {name}) compadd -- {' '.join(options)}{'; _files' * (name not in words.closed)} ;;"
        for name, options in words.options.items()
        if name not in words.keyed
    ]
    values = [f"          {key}) compadd -- {' '.join(values)} ;;" for key, values in words.keys.items() if values]
    return f"""\
#compdef octavo
# octavo completion zsh > a directory of $fpath/_octavo
_octavo() {{
  if (( CURRENT == 2 )); then
    local -a commands=({commands})
    _describe command commands
    return
  fi
  case $words[2] in
    {"|".join(words.keyed)})
      if [[ $PREFIX == *=* ]]; then
        local key=${{PREFIX%%=*}}
        compset -P '*='
        case $key in
{chr(10).join(values)}
          *) _files ;;
        esac
      else
        compadd -S '' -- {" ".join(f"{key}=" for key in words.keys)}
        _files -g '*.yml'
      fi ;;
{chr(10).join(plain)}
  esac
}}
if [ "$funcstack[1]" = _octavo ]; then _octavo "$@"; else compdef _octavo octavo; fi
"""


def _fish(words: _Words) -> str:
    lines = ["# octavo completion fish > ~/.config/fish/completions/octavo.fish"]
    for name, text in words.commands.items():
        lines.append(f"complete -c octavo -n __fish_use_subcommand -f -a {name} -d {_quoted(text)}")
        for option, help_ in words.options[name].items():
            kind = f"-l {option[2:]}" if option.startswith("--") else f"-a {option}"
            lines.append(f"complete -c octavo -n '__fish_seen_subcommand_from {name}' {kind} -d {_quoted(help_)}")
    # Fish offers files besides, unless it is told not to.
    lines.append(f"complete -c octavo -n '__fish_seen_subcommand_from {' '.join(words.closed)}' -f")
    seen = f"__fish_seen_subcommand_from {' '.join(words.keyed)}; and "
    keys = " ".join(f"{key}=" for key in words.keys)
    lines.append(f"complete -c octavo -n '{seen}not string match -q \"*=*\" -- (commandline -ct)' -a '{keys}'")
    for key, values in words.keys.items():
        if values:
            typed = " ".join(f"{key}={value}" for value in values)
            here = f'{seen}string match -q "{key}=*" -- (commandline -ct)'
            lines.append(f"complete -c octavo -n '{here}' -f -a '{typed}'")
    return "\n".join(lines) + "\n"


SHELLS: dict[str, Callable[[_Words], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
