#!/usr/bin/env bash
# Configuring: engines that are off or missing are in the table with a reason, and ON insists.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

configure=(cmake -G Ninja -S . -B "$work/build" -DLOCKSTEP_BUILD_TESTS=OFF -DLOCKSTEP_BUILD_BENCH=OFF
  -DLOCKSTEP_BUILD_EXAMPLES=OFF)
expect "switched off (LOCKSTEP_WITH_GLOO=OFF)" "${configure[@]}" -DLOCKSTEP_WITH_GLOO=OFF
expect "install libgloo-dev" "${configure[@]}" -DLOCKSTEP_WITH_GLOO=AUTO -DLOCKSTEP_GLOO_INCLUDE_DIR=
refuse "LOCKSTEP_WITH_GLOO is ON, but Gloo's headers were not found" \
  "${configure[@]}" -DLOCKSTEP_WITH_GLOO=ON -DLOCKSTEP_GLOO_INCLUDE_DIR=
rm -rf "$work/build"
expect "switched off (LOCKSTEP_WITH_MPI=OFF)" "${configure[@]}" -DLOCKSTEP_WITH_MPI=OFF
rm -rf "$work/build"
without_mpi=(-DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON)
expect "install libopenmpi-dev" "${configure[@]}" "${without_mpi[@]}"
refuse "LOCKSTEP_WITH_MPI is ON, but no MPI was found" "${configure[@]}" "${without_mpi[@]}" -DLOCKSTEP_WITH_MPI=ON
rm -rf "$work/build"
refuse "there is no LibTorch there" env LOCKSTEP_TORCH="$work" "${configure[@]}"

# A LibTorch for CUDA on a machine without CUDA's toolkit and headers is used for CPUs.
mkdir -p "$work/cuda/lib"
for entry in "$LOCKSTEP_TORCH"/* "$LOCKSTEP_TORCH"/lib/*; do
  [ -e "$work/cuda${entry#"$LOCKSTEP_TORCH"}" ] || ln -s "$entry" "$work/cuda${entry#"$LOCKSTEP_TORCH"}"
done
touch "$work/cuda/lib/libtorch_cuda.so"
rm -rf "$work/build"
expect "nccl.h or cuda_runtime.h was not found" env LOCKSTEP_TORCH="$work/cuda" "${configure[@]}" \
  -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON -DLOCKSTEP_NCCL_INCLUDE_DIR=

# Every usual way to say where LibTorch is.
rm -rf "$work/build"
expect "gloo" env -u LOCKSTEP_TORCH "${configure[@]}" -DCMAKE_PREFIX_PATH="$LOCKSTEP_TORCH"
rm -rf "$work/build"
expect "gloo" env -u LOCKSTEP_TORCH CMAKE_PREFIX_PATH="$LOCKSTEP_TORCH" "${configure[@]}"
rm -rf "$work/build"
expect "gloo" env -u LOCKSTEP_TORCH "${configure[@]}" -DTorch_DIR="$LOCKSTEP_TORCH/share/cmake/Torch"

# The build goes on without it, and says at run time why there is none.
rm -rf "$work/build"
"${configure[@]}" -DLOCKSTEP_WITH_GLOO=OFF -DLOCKSTEP_WITH_MPI=OFF -DCMAKE_BUILD_TYPE=Debug >/dev/null
ninja -C "$work/build" CMakeFiles/lockstep_engine.dir/src/engine/{gloo/no_gloo,mpi/no_mpi}.cpp.o >"$work/log" ||
  die "$(cat "$work/log")"
