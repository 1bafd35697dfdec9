#!/bin/bash
# A Python @VERSION@ of this host with the packages of the folder above this one: written by `headrace pack`.
# HEADRACE_BASE_PYTHON names it where it is not on PATH.
self=$(readlink -f "${BASH_SOURCE[0]}")
here=${self%/*/*}

# The program itself, of a name that may stand for a script (pyenv's) or for another version.
program() {
  local file magic=
  file=$(readlink -f "$1") && [ -x "$file" ] && [ "$file" != "$self" ] || return
  LC_ALL=C IFS= read -r -n 4 magic <"$file" || return
  if [ "$magic" = $'\x7fELF' ] && [[ $file = *python@VERSION@ ]]; then
    echo "$file"
  else
    "$1" -I -c 'import os, sys
if "%d.%d" % sys.version_info[:2] == "@VERSION@" and sys.implementation.name == "cpython":
    print(os.path.realpath(sys._base_executable))' 2>/dev/null
  fi
}

mapfile -t on_path < <(type -ap python@VERSION@ python3)
for candidate in "$HEADRACE_BASE_PYTHON" @RECORDED@ "${on_path[@]}" /usr/local/bin/python@VERSION@ /usr/bin/python@VERSION@; do
  [ -x "$candidate" ] && base=$(program "$candidate") && [ -n "$base" ] && break
  base=
done
if [ -z "$base" ]; then
  echo "headrace: this environment needs Python @VERSION@, and none is on PATH of $(uname -n): install it, or name it in HEADRACE_BASE_PYTHON" >&2
  exit 127
fi
# Where its library is, for builds that may lie anywhere. headrace-pack.pth takes it from the environment again.
home=${base%/*/*}
[ -f "$home/lib/python@VERSION@/os.py" ] && export PYTHONHOME=$home
exec -a "$here/bin/python" "$base" "$@"
