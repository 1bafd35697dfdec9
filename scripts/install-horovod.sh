#!/usr/bin/env bash
# Install Horovod of one flavour, or of another where that cannot be built; say by a stamp which it was.
#
# Usage: scripts/install-horovod.sh UV VENV STAMPS COMPILERS CUDA FLAVOUR [ELSE]
#   UV         the program
#   VENV       the environment
#   STAMPS     folder of its stamps: horovod.FLAVOUR is made, others are removed
#   COMPILERS  the target of `make` that installs the CUDA compilers: called for nccl
#   CUDA       where it puts them
set -euo pipefail

uv=$1 venv=$2 stamps=$3 compilers=$4 cuda=$5 flavour=$6 other=${7:-}

build() {
  if [ "$1" = nccl ]; then
    # By make, so that the compilers are fetched once, whoever wants them.
    MAKEFLAGS= make "$compilers" >&2 || return
  fi
  scripts/build-horovod.sh "$venv" "$1" "$cuda"
}

if ! wheel=$(build "$flavour"); then
  if [ -z "$other" ] || [ "$other" = "$flavour" ]; then exit 1; fi
  echo "install-horovod: '$flavour' could not be built (above); '$other' serves ranks on CPUs. \`make env HOROVOD=$flavour\` tries again" >&2
  flavour=$other
  wheel=$(build "$flavour")
fi
"$uv" pip install -q --python "$venv/bin/python" --no-deps --reinstall-package horovod "$wheel"
rm -f "$stamps"/horovod.*
touch "$stamps/horovod.$flavour"
