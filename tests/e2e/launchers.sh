#!/usr/bin/env bash
# The same binary alone and under the launchers that people already use.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"
program=$build/examples/small_model

export TMPDIR=$work
expect "1 rank, replicas equal: yes" "$program"
expect "3 ranks, replicas equal: yes" mpirun -n 3 "$program"
expect "started by OpenMPI" mpirun -n 2 sh -c "$program; exit" # through a wrapper
compgen -G "$work/lockstep-*" && die "a file was left behind"

# Beside a PyTorch that was installed by pip; an unpacked LibTorch has none.
torchrun=${LOCKSTEP_TORCH%/lib/python3*}/bin/torchrun
if [ -x "$torchrun" ]; then
  expect "started by torchrun" "$torchrun" --standalone --nproc-per-node 2 --no-python "$program"
elif [ "${CI:-}" ]; then
  die "there is no $torchrun"
fi

refuse "WORLD_SIZE is not set, but RANK=0 is" env RANK=0 "$program"
