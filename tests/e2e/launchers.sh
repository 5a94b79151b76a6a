#!/usr/bin/env bash
# The same binary alone and under the launchers that people already use.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"
program=$build/examples/small_model

export TMPDIR=$work
expect "1 rank, replicas equal: yes" "$program"
expect "3 ranks, replicas equal: yes" mpirun -n 3 "$program"
expect "started by OpenMPI" mpirun -n 2 sh -c "$program; exit" # through a wrapper
expect "3 ranks, replicas equal: yes" env LOCKSTEP_ENGINE=mpi mpirun -n 3 "$program"
expect "engine: mpi" env LOCKSTEP_ENGINE=mpi mpirun -n 2 "$program"
compgen -G "$work/lockstep-*" && die "a file was left behind"

# Beside a PyTorch that was installed by pip; an unpacked LibTorch has none.
torchrun=${LOCKSTEP_TORCH%/lib/python3*}/bin/torchrun
if [ -x "$torchrun" ]; then
  expect "started by torchrun" "$torchrun" --standalone --nproc-per-node 2 --no-python "$program"
elif [ "${CI:-}" ]; then
  die "there is no $torchrun"
fi

# lockstep's own: one host, then two launchers that know nothing of each other but a secret.
lockstep=$build/bin/lockstep
expect "3 ranks, replicas equal: yes" "$lockstep" run -n 3 -- "$program"
expect "started by lockstep" "$lockstep" run -n 2 -- "$program"
refuse "exit code 1" env LOCKSTEP_ENGINE=nonsense "$lockstep" run -n 2 -- "$program"
# A child that it did not start lives on and gets all output.
bash -c "exec $lockstep run -n 1 -- echo hello > >(sleep 0.3; gzip >$work/log.gz)"
for _ in $(seq 100); do
  zcat "$work/log.gz" 2>/dev/null | grep -q hello && break
  sleep 0.1
done
zcat "$work/log.gz" | grep -q hello || die "the launcher ended the process that reads its output"
export LOCKSTEP_SECRET=only-for-this-test
for engine in shm gloo; do
  port=$((20000 + RANDOM % 12000))
  hosts=(env LOCKSTEP_ENGINE=$engine "$lockstep" run --hosts 2 --master 127.0.0.1:$port)
  "${hosts[@]}" -n 1 --host-rank 1 -- "$program" >"$work/host1" 2>&1 &
  expect "3 ranks, replicas equal: yes" "${hosts[@]}" -n 2 --host-rank 0 -- "$program"
  wait $! || die "host 1 failed: $(cat "$work/host1")"
done

refuse "WORLD_SIZE is not set, but RANK=0 is" env RANK=0 "$program"
