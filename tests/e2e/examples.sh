#!/usr/bin/env bash
# Every example, alone and on two ranks, with what its header says to expect.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

examples=$build/examples
two=("$build/bin/lockstep" run -n 2 --)

check() { # check TEXT PROGRAM ARGUMENTS...: alone, and on two ranks
  local text=$1
  shift
  expect "$text" "$@"
  expect "$text" "${two[@]}" "$@"
}

check "replicas equal: yes" "$examples/small_model"
check "gradients equal: yes" "$examples/no_sync"
check "equal to one process with all data: yes" "$examples/uneven"
check "stiffness" "$examples/from_tensors"
check "8 bits" "$examples/comm_hook"
check "samples/s" "$examples/fashion_mnist" --steps 30
refuse "Options: --epochs N" "$examples/fashion_mnist" --epoch 3
refuse "want numbers" "$examples/gpt" --steps many
if [ -x "$examples/mpi_app" ]; then
  expect "weights 0.20 0.60 0.20" mpirun -n 2 "$examples/mpi_app"
fi

# The GPT, on a text of its own, learns something and writes a sample.
for _ in $(seq 200); do echo "the quick brown fox jumps over the lazy dog"; done >"$work/text"
expect "step  50  loss" "${two[@]}" "$examples/gpt" --steps 50 --text "$work/text"

# Stopped, and going on where it was.
cd "$work"
"${two[@]}" "$examples/fashion_mnist" --epochs 1 --folder run >"$work/log" 2>&1 &
job=$!
for _ in $(seq 300); do
  grep -q '[1-9][0-9]*/468' "$work/log" && break
  sleep 0.1
done
kill -TERM $job
wait $job && die "it was not stopped: $(cat "$work/log")"
expect "going on after step" "${two[@]}" "$examples/fashion_mnist" --epochs 1 --steps 468 --folder run

# Files stay short enough to read at once.
for file in "$repo"/examples/*.cpp; do
  [ "$(wc -l <"$file")" -le 150 ] || die "$file has more than 150 lines"
done
