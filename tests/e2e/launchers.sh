#!/usr/bin/env bash
# The same binary alone and under the launchers that people already use.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"
program=$build/examples/by_hand

export TMPDIR=$work
expect "1 rank, replicas equal: yes" "$program"
expect "3 ranks, replicas equal: yes" mpirun -n 3 "$program"
expect "started by OpenMPI" mpirun -n 2 sh -c "$program; exit" # through a wrapper
compgen -G "$work/lockstep-*" && die "a file was left behind"

torchrun=$(dirname "$(dirname "$(dirname "$(dirname "$(dirname "$LOCKSTEP_TORCH")")")")")/bin/torchrun
[ -x "$torchrun" ] || torchrun=$(command -v torchrun) || die "there is no torchrun beside this LibTorch"
expect "started by torchrun" "$torchrun" --standalone --nproc-per-node 2 --no-python "$program"

refuse "WORLD_SIZE is not set, but RANK=0 is" env RANK=0 "$program"
