"""Print the script that completes `polyrhythm` in a shell: commands, options, recipes, section.key= and their values.

  bash   source <(polyrhythm completion bash)          a line for ~/.bashrc
  zsh    source <(polyrhythm completion zsh)           a line for ~/.zshrc, after compinit
  fish   polyrhythm completion fish | source           a line for ~/.config/fish/config.fish

`words` is for these scripts: it reads the words of a command line, one a line, the last one unfinished, and prints what
can stand in the place of the last.
"""

from __future__ import annotations

import argparse
import sys

# Files are left to the shell: it completes them where nothing here fits. bash breaks words at = and :, so the words
# are cut from the line, and what stands before the last of these two is cut from the answers.
_BASH = r"""_polyrhythm() {
    local line=${COMP_LINE:0:COMP_POINT} words=() last answer
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    last=${words[-1]}
    COMPREPLY=()
    while IFS= read -r answer; do
        [[ $answer == *[.=] ]] && compopt -o nospace
        [[ $last == *[=:]* ]] && answer=${answer#"${last%"${last##*[=:]}"}"}
        COMPREPLY+=("$answer")
    done < <(printf '%s\n' "${words[@]:1}" | "${words[0]}" completion words 2>/dev/null)
}
complete -o default -F _polyrhythm polyrhythm
"""
_ZSH = r"""#compdef polyrhythm
_polyrhythm() {
    local -a answers begun
    answers=("${(@f)$(print -rl -- "${(@)words[2,CURRENT]}" | "$words[1]" completion words 2>/dev/null)}")
    begun=(${(M)answers:#*[.=]})
    answers=(${answers:#*[.=]})
    (( $#begun )) && compadd -S '' -- $begun
    (( $#answers )) && compadd -- $answers
    (( $#begun + $#answers )) || _files
}
compdef _polyrhythm polyrhythm
"""
_FISH = r"""function __polyrhythm
    set -l words (commandline -opc) (commandline -ct)
    printf '%s\n' $words[2..-1] | $words[1] completion words 2>/dev/null
end
complete -c polyrhythm -a '(__polyrhythm)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=(*SCRIPTS, "words"), help="the shell; words: see above")


def run(arguments: argparse.Namespace) -> int:
    if arguments.shell in SCRIPTS:
        print(SCRIPTS[arguments.shell], end="")
    else:
        from polyrhythm.plugins.completion.candidates import candidates

        print(*candidates(sys.stdin.read().removesuffix("\n").split("\n")), sep="\n")
    return 0
