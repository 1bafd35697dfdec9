#!/usr/bin/env bash
# Build Horovod's wheel from its patched source once, keep it in the user's cache, print its path.
#
# Usage: scripts/build-horovod.sh VENV [FLAVOUR]      FLAVOUR: gloo (default)
#
# Horovod 0.28.1 is the last release and nothing prebuilt exists for a current torch. Its build says C++14 where
# torch needs C++17, so two lines are changed. The wheel is keyed by everything its binary depends on.
set -euo pipefail

venv=$1
flavour=${2:-gloo}
version=0.28.1
python=$venv/bin/python
torch=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))')
cpython=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
arch=$(uname -m)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/headrace/wheels/horovod-$version-torch$torch-$cpython-$arch-$flavour

if wheel=$(ls "$cache"/horovod-*.whl 2>/dev/null); then
  echo "$wheel"
  exit 0
fi
[ "$flavour" = gloo ] || { echo "build-horovod: unknown flavour '$flavour' (known: gloo)" >&2; exit 2; }
for tool in g++ make; do
  command -v "$tool" >/dev/null || { echo "build-horovod: '$tool' is missing: apt-get install build-essential" >&2; exit 2; }
done

mkdir -p "$cache"
work=$(mktemp -d "${TMPDIR:-/tmp}/horovod-XXXXXX")
trap 'rm -rf "$work"' EXIT
log=$cache/build.log
echo "building Horovod $version for torch $torch, $cpython, $flavour (about 5 minutes on 2 cores); log: $log" >&2

# pip, not uv: uv has no command that downloads an sdist without building it.
"$python" -m pip download -q --no-deps --no-binary :all: --no-build-isolation -d "$work" "horovod==$version" >"$log" 2>&1 \
  || { tail -20 "$log" >&2; echo "build-horovod: could not download horovod $version" >&2; exit 1; }
tar -xzf "$work"/horovod-$version.tar.gz -C "$work"
src=$work/horovod-$version
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' "$src/CMakeLists.txt" "$src/horovod/torch/CMakeLists.txt"

if ! (
  cd "$src"
  export PATH="$(cd "$OLDPWD" && realpath "$venv")/bin:$PATH" CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS="-j$(nproc)"
  export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_GLOO=1
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
