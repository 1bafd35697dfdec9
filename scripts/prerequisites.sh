#!/usr/bin/env bash
# Make sure of what no wheel brings: CPython with venv and headers, a JDK (17 or 21), g++, make, patch, Gradle.
# As root on Debian what is missing is installed; else one line names the packages.
#
#   scripts/prerequisites.sh [INTERPRETER]            check, install, report
#   scripts/prerequisites.sh --python [INTERPRETER]   print the path of the interpreter that is used
#   scripts/prerequisites.sh --version [INTERPRETER]  print its version, as 3.13
#
#   INTERPRETER   a path, or a name such as python3.13; python3.11 by default. It is a CPython that has a lock below
#                 requirements/. A name is looked for on PATH, in /usr/local/bin and /usr/bin, and among the versions
#                 that pyenv and uv have installed for this user
set -euo pipefail

default=python3.11
locks=${BASH_SOURCE[0]%/*}/../requirements

# Versions that have locks: the default one's lie in requirements/, others' in folders of their own.
versions=(${default#python})
for folder in "$locks"/3.*/; do versions+=("$(basename "$folder")"); done

# What INTERPRETER may stand for, best first. Of a name with a version `python3` may be one, too.
candidates() {
  case $1 in */*) echo "$1"; return ;; esac
  type -ap "$1" || true
  if [[ $1 =~ ^python3\.[0-9]+$ ]]; then
    type -ap python3 || true
    local version=${1#python} file
    for file in "/usr/local/bin/$1" "/usr/bin/$1" /usr/bin/python3 \
      "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python \
      "${XDG_DATA_HOME:-$HOME/.local/share}/uv/python/cpython-$version".*/bin/python; do
      [ -x "$file" ] && echo "$file"
    done
  fi
  return 0
}

# Print version and path of the first candidate that runs and is what the name says. A pyenv shim may not run.
find_python() {
  local candidate
  while read -r candidate; do
    "$candidate" -c '
import sys
version, name = "%d.%d" % sys.version_info[:2], sys.argv[1]
asked = name[6:] if name.startswith("python3.") else version
if sys.implementation.name != "cpython" or version != asked:
    raise SystemExit(1)
print(version, sys.executable)' "$1" 2>/dev/null && return
  done < <(candidates "$1")
  return 1
}

refuse() {
  echo "prerequisites: $*" >&2
  exit 2
}

print=
case "${1:-}" in --python | --version) print=$1; shift ;; esac
interpreter=${1:-$default}
read -r version python < <(find_python "$interpreter") || true

if [ -n "${python:-}" ] && [[ " ${versions[*]} " != *" $version "* ]]; then
  refuse "$interpreter is Python $version ($python), and headrace has locks for ${versions[*]}"
fi
if [ -z "${python:-}" ] && { [ -n "$print" ] || [ "$interpreter" != "$default" ]; }; then
  case $interpreter in
    */*) refuse "$interpreter is no CPython that runs" ;;
    *) refuse "no $interpreter that runs: looked for it on PATH ($PATH), in /usr/local/bin and /usr/bin, and below" \
      "${PYENV_ROOT:-$HOME/.pyenv}/versions and ${XDG_DATA_HOME:-$HOME/.local/share}/uv/python. Give its path: PYTHON=/path/to/python" ;;
  esac
fi
case $print in
  --python) echo "$python"; exit ;;
  --version) echo "$version"; exit ;;
esac

missing=()
if [ -z "${python:-}" ]; then
  missing+=("$interpreter")
else
  "$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=("$interpreter-venv")
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')
  [ -f "$header" ] || missing+=("$interpreter-dev")
fi
java_major=$(javac -version 2>&1 | sed -n 's/^javac \([0-9]*\).*/\1/p')
case "$java_major" in 17 | 21) ;; *) missing+=(openjdk-17-jdk-headless) ;; esac
command -v g++ >/dev/null || missing+=(build-essential)
command -v patch >/dev/null || missing+=(patch)
command -v gradle >/dev/null || missing+=(gradle)

[ ${#missing[@]} = 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "    installing ${missing[*]}" >&2
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
  echo "missing: ${missing[*]}. On Debian: sudo apt-get install ${missing[*]}" >&2
  exit 2
fi
