#!/usr/bin/env bash
# The same binary alone and under the launchers that people already use.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"
program=$build/examples/small_model

export TMPDIR=$work XDG_RUNTIME_DIR=
expect "1 rank, replicas equal: yes" "$program"
expect "3 ranks, replicas equal: yes" mpirun -n 3 "$program"
expect "started by OpenMPI" mpirun -n 2 sh -c "$program; exit" # through a wrapper
expect "3 ranks, replicas equal: yes" env LOCKSTEP_ENGINE=mpi mpirun -n 3 "$program"
expect "engine: mpi" env LOCKSTEP_ENGINE=mpi mpirun -n 2 "$program"

# MPICH's, beside OpenMPI, which the program is built with.
expect "3 ranks, replicas equal: yes" mpiexec.hydra -n 3 "$program"
expect "started by PMI" mpiexec.hydra -n 2 sh -c "$program; exit"
hosts=(mpiexec.hydra -launcher fork -hosts 127.0.0.1,127.0.0.2 -ppn 1 -n 2)
refuse "PMI started 2 ranks on several hosts, and MASTER_ADDR" "${hosts[@]}" "$program"
port=$((20000 + RANDOM % 12000))
expect "2 ranks, replicas equal: yes" env MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "${hosts[@]}" "$program"
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
LOCKSTEP_SECRET=$("$lockstep" secret)
export LOCKSTEP_SECRET
for engine in shm gloo; do
  port=$((20000 + RANDOM % 12000))
  hosts=(env LOCKSTEP_ENGINE=$engine "$lockstep" run --hosts 2 --master 127.0.0.1:$port)
  "${hosts[@]}" -n 1 --host-rank 1 -- "$program" >"$work/host1" 2>&1 &
  expect "3 ranks, replicas equal: yes" "${hosts[@]}" -n 2 --host-rank 0 -- "$program"
  wait $! || die "host 1 failed: $(cat "$work/host1")"
done

refuse "WORLD_SIZE is not set, but RANK=0 is" env RANK=0 "$program"
