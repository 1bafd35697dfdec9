"""Shell completion of commands, options, stages and pipelines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.stages import ORDER

_HEADRACE = Path(sys.executable).with_name("headrace")


def completed(words: str, shell: str, folder: Path) -> list[str]:
    """Return the completions of the last word, by the shell's own protocol."""
    environment = {"_HEADRACE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words}
    environment |= {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    ran = subprocess.run(
        [_HEADRACE], env=os.environ | environment, cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    return ran.stdout.split()


def test_bash_completes_by_the_script(tmp_path: Path) -> None:
    """The script as bash runs it: commands, stages, shipped pipelines, files and folders."""
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mine.txt").touch()
    (tmp_path / "more").mkdir()
    lines = ["headrace sta", "headrace run --from b", "headrace run cri", "headrace run m"]
    script = f"""
        PATH={_HEADRACE.parent}:$PATH
        eval "$(_HEADRACE_COMPLETE=source_bash headrace)"
        complete -p headrace
        while read -r line; do
            COMP_WORDS=($line); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
            _headrace_completion headrace
            echo "${{COMPREPLY[*]}}"
        done
    """
    ran = subprocess.run(
        ["bash", "-c", script], input="\n".join(lines) + "\n", cwd=tmp_path, capture_output=True, text=True, check=True
    )
    hook, *words = ran.stdout.splitlines()
    assert hook.endswith("-F _headrace_completion headrace")
    assert words == ["status", "baseline", "criteo", "mine.yaml more/ movielens"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_the_same(shell: str, tmp_path: Path) -> None:
    assert "talkingdata" in " ".join(completed("headrace run talk", shell, tmp_path))
    stages = " ".join(completed("headrace run --to ", shell, tmp_path))
    assert all(stage in stages for stage in ORDER)
