"""Shell completion of the command `parallel3d`: `eval "$(parallel3d --completion bash)"`."""

from collections.abc import Iterable

SHELLS = ("bash", "zsh")
_ZSH = "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n"
# The flags and settings of a command are those that its help lists; they are asked for once.
_SCRIPT = """_parallel3d() {
  local word=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} flags
  COMPREPLY=()
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W "@COMMANDS" -- "$word"))
    return
  fi
  case $word in -*) ;; *) return ;; esac
  case " @COMMANDS " in *" $command "*) ;; *) return ;; esac
  eval "flags=\\$_parallel3d_flags_$command"
  if [ -z "$flags" ]; then
    flags=$(parallel3d "$command" --help 2>/dev/null |
      grep -Eo '(^|[ [])--[A-Za-z][A-Za-z0-9_.-]*' | tr -d ' [' | sort -u | tr '\\n' ' ')
    eval "_parallel3d_flags_$command=\\$flags"
  fi
  COMPREPLY=($(compgen -W "$flags" -- "$word"))
}
complete -o default -F _parallel3d parallel3d
"""


def script(shell: str, commands: Iterable[str]) -> str:
    """Return the script that completes commands, flags, settings and paths in one of SHELLS."""
    return _ZSH * (shell == "zsh") + _SCRIPT.replace("@COMMANDS", " ".join(commands))
