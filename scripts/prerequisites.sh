#!/usr/bin/env bash
# Make sure of what no wheel brings: CPython 3.11 with venv and headers, a JDK (17 or 21), g++, make, Gradle.
# As root on Debian what is missing is installed; else one line names the packages.
#
#   scripts/prerequisites.sh            check, install, report
#   scripts/prerequisites.sh --python   print the interpreter that is used
set -euo pipefail

python311() {
  local candidate
  for candidate in python3.11 python3 /usr/bin/python3; do
    if "$candidate" -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

if [ "${1:-}" = --python ]; then
  python311
  exit
fi

missing=()
python=$(python311) || missing+=(python3.11)
if [ -n "$python" ]; then
  "$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')
  [ -f "$header" ] || missing+=(python3-dev)
fi
java_major=$(javac -version 2>&1 | sed -n 's/^javac \([0-9]*\).*/\1/p')
case "$java_major" in 17 | 21) ;; *) missing+=(openjdk-17-jdk-headless) ;; esac
command -v g++ >/dev/null || missing+=(build-essential)
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
