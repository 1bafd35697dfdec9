#!/usr/bin/env bash
# Install Horovod of one flavour into .venv, or of another where that cannot be built; say by a stamp which it was.
#
# Usage: scripts/install-horovod.sh UV STAMPS CUDA FLAVOUR [ELSE]
#   UV       the program
#   STAMPS   folder of the stamps: horovod.FLAVOUR is made, others are removed
#   CUDA     where `make` puts the CUDA compilers; made for nccl where they are not there
set -euo pipefail

uv=$1 stamps=$2 cuda=$3 flavour=$4 other=${5:-}

build() {
  if [ "$1" = nccl ]; then
    # By make, so that the compilers are fetched once, whoever wants them.
    MAKEFLAGS= make "$stamps/cuda" >&2 || return
  fi
  scripts/build-horovod.sh .venv "$1" "$cuda"
}

if ! wheel=$(build "$flavour"); then
  if [ -z "$other" ] || [ "$other" = "$flavour" ]; then exit 1; fi
  echo "install-horovod: '$flavour' could not be built (above); '$other' serves ranks on CPUs. \`make env HOROVOD=$flavour\` tries again" >&2
  flavour=$other
  wheel=$(build "$flavour")
fi
"$uv" pip install -q --python .venv/bin/python --no-deps --reinstall-package horovod "$wheel"
rm -f "$stamps"/horovod.*
touch "$stamps/horovod.$flavour"
