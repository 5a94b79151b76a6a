#!/usr/bin/env bash
# lockstep as a subdirectory of another project, as a shared library.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

# Not in $work: ccache knows files by their paths.
consumer=$build/e2e/add_subdirectory
rm -rf "$consumer"
fenced README.md cpp >"$work/train.cpp"
cmake -G Ninja -S tests/consumer -B "$consumer" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 -DPROGRAM="$work/train.cpp" \
  -DLOCKSTEP_SOURCES="$repo" -DCMAKE_PREFIX_PATH="$LOCKSTEP_TORCH" >"$work/log" || die "$(cat "$work/log")"
grep -qi gtest "$consumer/CMakeCache.txt" && die "a subdirectory must not look for GoogleTest"
cmake --build "$consumer" >"$work/log" || die "$(cat "$work/log")"
expect "CPUFloatType{2,1,4}" mpirun -n 2 "$consumer/train"

# Only what is marked is visible; errors are caught across the library's border.
library=$(find "$consumer" -name 'liblockstep.so')
nm -DC --defined-only "$library" >"$work/symbols"
grep -q 'lockstep::World::join' "$work/symbols" || die "World::join is not exported"
grep 'lockstep::read_placement' "$work/symbols" && die "internals are exported"
exit 0
