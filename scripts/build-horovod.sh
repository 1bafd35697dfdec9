#!/usr/bin/env bash
# Build Horovod's wheel from its patched source once, keep it in the user's cache, print its path.
#
# Usage: scripts/build-horovod.sh VENV [FLAVOUR [CUDA]]
#   FLAVOUR  gloo (default): messages of CPU tensors; nccl: those too, and of tensors on GPUs by NCCL
#   CUDA     nccl: a folder with bin/nvcc, include and lib64 (build/tools/cuda/nvidia/cu13 of `make native-cuda`)
#
# Horovod 0.28.1 is the last release and nothing prebuilt exists for a current torch or Python. native/horovod/*.patch
# make it build with both; each says why. The wheel is keyed by everything its binary depends on. The flavour nccl
# needs neither a GPU nor a CUDA installation: compilers from the package index, NCCL from the packages that torch
# brings. It is built for sm_80 and sm_90, and runs on machines without a GPU, through gloo.
set -euo pipefail

venv=$1
flavour=${2:-gloo}
cuda=${3:-}
version=0.28.1
python=$venv/bin/python
torch=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))')
cpython=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
arch=$(uname -m)
patches=("${BASH_SOURCE[0]%/*}"/../native/horovod/*.patch)
patched=$(cat "${patches[@]}" | sha256sum | cut -c-8)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/headrace/wheels/horovod-$version-torch$torch-$cpython-$arch-$flavour-$patched

if wheel=$(ls "$cache"/horovod-*.whl 2>/dev/null); then
  echo "$wheel"
  exit 0
fi
case $flavour in gloo | nccl) ;; *) echo "build-horovod: unknown flavour '$flavour' (known: gloo, nccl)" >&2; exit 2 ;; esac
if [ "$flavour" = nccl ]; then
  nccl=$("$python" -c 'import os, sysconfig; print(os.path.realpath(sysconfig.get_path("purelib")))')/nvidia/nccl
  for file in "$cuda/bin/nvcc" "$cuda/lib64/libcudart.so.13" "$nccl/include/nccl.h" "$nccl/lib/libnccl.so.2"; do
    [ -e "$file" ] || { echo "build-horovod: nccl needs ${file:-nvcc}, which is not there: run it by \`make env HOROVOD=nccl\`" >&2; exit 2; }
  done
fi
for tool in g++ make patch; do
  command -v "$tool" >/dev/null || { echo "build-horovod: '$tool' is missing: apt-get install build-essential" >&2; exit 2; }
done

mkdir -p "$cache"
work=$(mktemp -d "${TMPDIR:-/tmp}/horovod-XXXXXX")
trap 'rm -rf "$work"' EXIT
log=$cache/build.log
echo "building Horovod $version for torch $torch, $cpython, $flavour (some minutes on 2 cores); log: $log" >&2

# pip, not uv: uv has no command that downloads an sdist without building it.
"$python" -m pip download -q --no-deps --no-binary :all: --no-build-isolation -d "$work" "horovod==$version" >"$log" 2>&1 \
  || { tail -20 "$log" >&2; echo "build-horovod: could not download horovod $version" >&2; exit 1; }
tar -xzf "$work"/horovod-$version.tar.gz -C "$work"
src=$work/horovod-$version
for patch in "${patches[@]}"; do
  # Without fuzz: a hunk that does not fit exactly belongs to another version.
  patch -p1 --fuzz=0 -d "$src" <"$patch" >>"$log" 2>&1 \
    || { tail -20 "$log" >&2; echo "build-horovod: ${patch##*/} does not fit horovod $version" >&2; exit 1; }
done
if [ "$flavour" = nccl ]; then
  # Linkers look for names without versions, which the packages do not have: links to all that they have, and those.
  cuda=$(realpath "$cuda")
  mkdir -p "$work/cuda/lib" "$work/cuda/include" "$work/nccl/lib"
  ln -s "$cuda"/bin "$cuda"/nvvm "$work/cuda/"
  ln -s "$cuda"/include/* "$work/cuda/include/"
  # torch's own headers include those of cuBLAS and its like, which only the packages that torch brings have.
  for file in "$nccl"/../cu13/include/*; do
    [ -e "$work/cuda/include/${file##*/}" ] || ln -s "$(realpath "$file")" "$work/cuda/include/"
  done
  ln -s "$cuda"/lib64/* "$work/cuda/lib/"
  ln -s libcudart.so.13 "$work/cuda/lib/libcudart.so"
  ln -s lib "$work/cuda/lib64"
  ln -s "$nccl/include" "$work/nccl/include"
  ln -s "$nccl"/lib/* "$work/nccl/lib/"
  ln -s libnccl.so.2 "$work/nccl/lib/libnccl.so"
fi

if ! (
  cd "$src"
  export PATH="$(cd "$OLDPWD" && realpath "$venv")/bin:$PATH" CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS="-j$(nproc)"
  export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_GLOO=1
  if [ "$flavour" = nccl ]; then
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_BUILD_CUDA_CC_LIST=80,90
    export HOROVOD_CUDA_HOME=$work/cuda CUDA_HOME=$work/cuda HOROVOD_NCCL_HOME=$work/nccl PATH=$work/cuda/bin:$PATH
  fi
  python -m pip wheel -q --no-build-isolation --no-deps -w "$work/dist" .
) >>"$log" 2>&1; then
  tail -30 "$log" >&2
  echo "build-horovod: the build failed; the whole log is $log" >&2
  exit 1
fi
# Renaming is atomic: a build that dies half way leaves no wheel that a later run would trust.
built=$(basename "$work"/dist/horovod-*.whl)
cp "$work/dist/$built" "$cache/.$built.partial"
mv "$cache/.$built.partial" "$cache/$built"
echo "$cache/$built"
