#!/usr/bin/env bash
# README's program, outside the tree, against an installed lockstep that was moved after installing.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

cmake --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/moved"
grep -rlF -e "$work/first" -e "$repo" "$work/moved/lib/cmake" && die "the package holds absolute paths"

mkdir "$work/project"
fenced README.md cpp >"$work/project/train.cpp"
fenced README.md cmake >"$work/project/CMakeLists.txt"
cd "$work/project"
export CMAKE_PREFIX_PATH=$work/moved PATH=$work/moved/bin:$PATH
while read -r line; do
  printf '+ %s\n' "$line"
  bash -ec "$line"
done < <(fenced "$repo/README.md" "sh consumer")

# Two ranks have the same weights: the stacked tensor's two rows are equal.
mpirun -n 2 build/train 2>/dev/null | tee "$work/out"
grep -q 'CPUFloatType{2,1,4}' "$work/out" || die "there are no two replicas"
[ "$(grep -cE '^ *[0-9]' "$work/out")" -eq 2 ] || die "there are no two rows"
[ "$(grep -E '^ *[0-9]' "$work/out" | sort -u | wc -l)" -eq 1 ] || die "the replicas differ"
