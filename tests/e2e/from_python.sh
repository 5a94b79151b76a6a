#!/usr/bin/env bash
# docs/from-python.md has every argument, method and helper of Python's DistributedDataParallel,
# torch.distributed.algorithms and DistributedSampler, and each test that it names exists.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

need_package torch
for program in "$build"/tests/test_*; do
  if [ -f "$program" ] && [ -x "$program" ]; then "$program" --gtest_list_tests; fi
done >"$work/tests"
ctest --test-dir "$build" -N -L e2e | sed -n 's/.*: \(e2e\)\.\(.*\)/\1.\n  \2/p' >>"$work/tests"

"$python" tests/e2e/from_python.py docs/from-python.md "$work/tests"
