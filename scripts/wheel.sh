#!/usr/bin/env bash
# Build headrace's wheel from a checkout in which `make env` has run; for lakes in S3 also `make s3` (`make wheel` does
# both).
#
# Usage: scripts/wheel.sh FOLDER [PYTHON]
#   FOLDER   where it goes
#   PYTHON   of an environment with setuptools and wheel; .venv's by default
set -euo pipefail

mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
# Of its own, and removed: what an earlier build left there would be packed, too.
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
"${2:-.venv/bin/python}" -W ignore setup.py -q egg_info --egg-base "$build" build --build-base "$build" \
  bdist_wheel --bdist-dir "$build/bdist" --dist-dir "$folder" 2>"$build/log" >&2 || { cat "$build/log" >&2; exit 1; }
