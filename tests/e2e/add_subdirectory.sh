#!/usr/bin/env bash
# lockstep as a subdirectory of another project, as a shared library.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

fenced README.md cpp >"$work/train.cpp"
cmake -G Ninja -S tests/consumer -B "$work/build" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 -DPROGRAM="$work/train.cpp" \
  -DLOCKSTEP_SOURCES="$repo" -DCMAKE_PREFIX_PATH="$LOCKSTEP_TORCH" >"$work/log" || die "$(cat "$work/log")"
grep -qi gtest "$work/build/CMakeCache.txt" && die "a subdirectory must not look for GoogleTest"
cmake --build "$work/build" >"$work/log" || die "$(cat "$work/log")"
expect "CPUFloatType{2,1,4}" mpirun -n 2 "$work/build/train"

# Only what is marked is visible; errors are caught across the library's border.
library=$(find "$work/build" -name 'liblockstep.so')
nm -DC --defined-only "$library" >"$work/symbols"
grep -q 'lockstep::World::join' "$work/symbols" || die "World::join is not exported"
grep 'lockstep::read_placement' "$work/symbols" && die "internals are exported"
exit 0
