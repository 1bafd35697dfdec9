#!/usr/bin/env bash
# Build headrace's wheel from a checkout in which `make env` has run, and a wheel of each package in plugins/; for lakes
# in S3 also `make s3` (`make wheel` does both).
#
# Usage: scripts/wheel.sh FOLDER [PYTHON]
#   FOLDER   where they go
#   PYTHON   of an environment with setuptools and wheel; .venv's by default
set -euo pipefail

mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
python=$(realpath -s "${2:-.venv/bin/python}")
# Of its own, and removed: what an earlier build left there would be packed, too.
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

# wheel SETUP...: of the working folder's project.
wheel() {
  "$python" -W ignore "$@" -q egg_info --egg-base "$build" build --build-base "$build/build" \
    bdist_wheel --bdist-dir "$build/bdist" --dist-dir "$folder" 2>"$build/log" >&2 || { cat "$build/log" >&2; exit 1; }
  rm -rf "${build:?}"/*
}

wheel setup.py
for plugin in plugins/headrace-*; do
  (cd "$plugin" && wheel -c 'from setuptools import setup; setup()')
done
