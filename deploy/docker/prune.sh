#!/bin/sh
# Removes what serving does not need from an environment: `prune.sh /opt/bloomery`. Headers, tests,
# static libraries, debug symbols, torch's own compiler and pip are about a third of it.
set -eu
packages=$(echo "$1"/lib/python3*/site-packages)

rm -rf "$packages"/torch/include "$packages"/torch/test "$packages"/torch/share \
  "$packages"/torch/bin/test_* "$packages"/torch/bin/protoc* "$packages"/torch/lib/*_test.so \
  "$packages"/torch/_inductor "$packages"/torch/onnx \
  "$packages"/sympy "$packages"/mpmath "$packages"/networkx \
  "$packages"/numpy/*/tests "$packages"/numpy/tests "$packages"/numpy/_core/include \
  "$packages"/numpy/_core/lib "$packages"/numpy/f2py \
  "$packages"/triton/backends/amd/include "$packages"/triton/backends/amd/lib \
  "$packages"/triton/FileCheck "$packages"/triton/include \
  "$packages"/triton/instrumentation "$packages"/triton/_C/libproton.so \
  "$packages"/nvidia/cu*/lib/libcusolverMg.so.* "$packages"/nvidia/cu*/lib/libnvblas.so.* \
  "$packages"/nvidia/cu*/lib/libcufftw.so.* "$packages"/nvidia/cu*/lib/libnvperf_*.so* \
  "$packages"/nvidia/*/include "$packages"/nvidia/*/*/include \
  "$packages"/pip "$packages"/pip-* "$packages"/setuptools "$packages"/setuptools-*
find "$packages" -name '*.a' -delete
find "$packages" -name __pycache__ -type d -prune -exec rm -rf {} +

if command -v strip >/dev/null; then
  for name in torch triton uvloop; do
    if [ -d "$packages/$name" ]; then
      find "$packages/$name" -name '*.so' -exec strip --strip-unneeded {} +
    fi
  done
fi
