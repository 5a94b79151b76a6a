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

check "replicas equal: yes" "$examples/small_model" --device cpu
refuse "There is no device cuda" "$examples/small_model" --device cuda # no GPU here
check "gradients equal: yes" "$examples/no_sync" --device cpu
check "equal to one process with all data: yes" "$examples/uneven" --device cpu
check "stiffness" "$examples/from_tensors" --device cpu
check "8 bits" "$examples/comm_hook" --device cpu
for example in small_model no_sync uneven from_tensors comm_hook; do
  refuse "usage: $example" "$examples/$example" --devices cpu
done
check "weights 1.00 2.00 3.00 4.00" "$examples/elastic" 1500 "$work/elastic"
# One of its ranks is killed, and the weights are the same.
rm -rf "$work/elastic"
whole=$("$examples/elastic" 5000 "$work/elastic" | grep -o 'weights .*)') || die "elastic failed"
rm -rf "$work/elastic"
"$build/bin/lockstep" run -n 3 --elastic --job-id "e2e-$$" -- "$examples/elastic" 5000 "$work/elastic" >"$work/log" 2>&1 &
job=$!
for _ in $(seq 300); do  # until it trains
  "$build/bin/lockstep" top "e2e-$$" 2>/dev/null | grep -q ' steps/s ' && break
  sleep 0.1
done
kill -9 "$(pgrep -n -f "^$examples/elastic 5000 $work/elastic\$")"
wait $job || die "elastic: $(cat "$work/log")"
grep -q "2 ranks go on" "$work/log" || die "no rank was lost: $(cat "$work/log")"
grep -qF "$whole" "$work/log" || die "other weights than $whole: $(cat "$work/log")"
check "samples/s" "$examples/fashion_mnist" --steps 30 --device cpu
check "balanced for" "$examples/ppo" 2 --device cpu
refuse "usage: ppo" "$examples/ppo" many
refuse "Options: --epochs N" "$examples/fashion_mnist" --epoch 3
refuse "want numbers" "$examples/gpt" --steps many
if [ -x "$examples/mpi_app" ]; then
  expect "weights 0.20 0.60 0.20" mpirun -n 2 "$examples/mpi_app"
fi

# The GPT, on a text of its own, learns something and writes a sample.
for _ in $(seq 200); do echo "the quick brown fox jumps over the lazy dog"; done >"$work/text"
expect "step  50  loss" "${two[@]}" "$examples/gpt" --steps 50 --text "$work/text" --device cpu --loss-file "$work/losses_whole"
expect "step  50  loss" "${two[@]}" "$examples/gpt" --steps 50 --text "$work/text" --device cpu --shard --loss-file "$work/losses_shared"
# The same bits, whoever has them.
losses() { sed 's/.*"loss":\([^,}]*\).*/\1/' "$1"; }
[ "$(losses "$work/losses_whole" | wc -l)" = 50 ] || die "no losses in $(head -2 "$work/losses_whole")"
[ "$(losses "$work/losses_whole")" = "$(losses "$work/losses_shared")" ] || die "gpt --shard has other losses than gpt"

# PPO learns, and goes on from a checkpoint to the same bits.
cd "$work"
"${two[@]}" "$examples/ppo" 10 whole >"$work/log" 2>&1 || die "ppo: $(cat "$work/log")"
weights=$(grep -o 'weights .*' "$work/log")
grep -oE 'balanced for [0-9]+' "$work/log" | awk '$3 == 300 { found = 1 } END { exit !found }' ||
  die "ppo learned nothing: $(cat "$work/log")"
expect "weights" "${two[@]}" "$examples/ppo" 4 parts
expect "$weights" "${two[@]}" "$examples/ppo" 10 parts
expect "update  11" "$examples/ppo" 11 parts # alone

# Stopped, and going on where it was.
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
