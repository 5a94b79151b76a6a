#!/usr/bin/env bash
# Slurm itself, on this machine: srun starts ranks, and docs/launching.md's batch script is run as it stands there.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"
program=$build/examples/small_model
if ! command -v slurmctld >/dev/null; then
  [ -z "${CI:-}" ] || die "Slurm is not installed"
  echo "not run: Slurm is not installed (slurmctld, slurmd, slurm-client, munge)"
  exit 77
fi

# Daemons of the test's own, on the loopback and with a configuration of their own; they end with it.
daemons=()
stop_daemons() {
  local pid
  for pid in "${daemons[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${daemons[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$work"
}
trap stop_daemons EXIT
start() {
  local name=$1
  shift
  "$@" >"$work/$name.log" 2>&1 &
  daemons+=($!)
}

# wait_for SECONDS COMMAND...: until the command succeeds.
wait_for() {
  local deadline=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $deadline ] || die "'$*' did not succeed:"$'\n'"$(tail -n 20 "$work"/*.log)"
    sleep 0.2
  done
}

user=$(id -un)
port=$((12000 + RANDOM % 6000))
mkdir -p "$work"/{munge,state,spool}
head -c 128 /dev/urandom >"$work/munge/key"
chmod 700 "$work/munge"
chmod 600 "$work/munge/key"
start munged munged --foreground --force --key-file "$work/munge/key" --socket "$work/munge/socket" \
  --pid-file "$work/munge/pid" --log-file "$work/munge/log" --seed-file "$work/munge/seed"
wait_for 30 test -S "$work/munge/socket"

export SLURM_CONF=$work/slurm.conf
cat >"$SLURM_CONF" <<CONF
ClusterName=lockstep
SlurmctldHost=$(hostname -s)(127.0.0.1)
AuthInfo=socket=$work/munge/socket
SlurmUser=$user
SlurmdUser=$user
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=localhost NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes=localhost Default=YES State=UP
CONF
start slurmctld slurmctld -D -f "$SLURM_CONF"
start slurmd slurmd -D -f "$SLURM_CONF" -N localhost
wait_for 60 sh -c 'sinfo -h -o %T | grep -qx idle'

# srun starts the ranks.
export TMPDIR=$work XDG_RUNTIME_DIR=
expect "3 ranks, replicas equal: yes" srun -n 3 "$program"
expect "started by Slurm" srun -n 2 sh -c "$program; exit" # through a wrapper
expect "1 rank, replicas equal: yes" srun -n 1 "$program"
compgen -G "$work/lockstep-*" && die "a file was left behind"

# srun starts the launchers. The script's #SBATCH line asks for two large hosts.
fenced docs/launching.md bash | sed "s|\./train|$program|" >"$work/script"
grep -q "srun --cpus-per-task" "$work/script" || die "docs/launching.md has no batch script"
PATH=$build/bin:$PATH expect "Submitted batch job" sbatch --nodes=1 --cpus-per-task=2 --output="$work/batch" "$work/script"
wait_for 60 sh -c "[ -z \"\$(squeue -h)\" ]"
grep -qF "replicas equal: yes" "$work/batch" || die "the batch script printed:"$'\n'"$(cat "$work/batch")"
grep -qF "started by lockstep" "$work/batch" || die "the batch script printed:"$'\n'"$(cat "$work/batch")"

# Two launchers as hosts of one job, which has Slurm's number; one that has another is refused.
LOCKSTEP_SECRET=$("$build/bin/lockstep" secret)
export LOCKSTEP_SECRET
hosts="exec $build/bin/lockstep run -n 1 --hosts 2 --host-rank \$SLURM_PROCID --master 127.0.0.1:$((port + 2))"
expect "2 ranks, replicas equal: yes" srun -n 2 bash -c "$hosts -- $program"
refuse "host 1 has the job id 'another', host 0 has the job id" \
  srun -n 2 bash -c "$hosts --join-timeout 5 \$([ \$SLURM_PROCID = 0 ] || echo --job-id another) -- $program"
