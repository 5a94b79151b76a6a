#!/usr/bin/env python3
"""The peer of ./dev bench recover that starts all ranks anew: torchrun, with DDP on Gloo and a checkpoint per step.

    build/venv/bin/python3 bench/peers/recover_torchrun.py [--kills K] [--json]

`torchrun --standalone --nproc-per-node 4 --max-restarts N`. After each step rank 0 saves weights, optimizer state and
the number of the step with torch.save(), to tmpfs where there is one, and renames the file into place; the step ends
after that. When a rank dies, torchrun ends the others and starts all 4 again; they load the checkpoint. A recovery
ends when all 4 have completed a step: see recover.py.

Settings are torchrun's defaults. These matter:
    --monitor-interval  0.1 s   how often the agent looks whether a rank has died
    --shutdown-timeout  30 s    how long others have to end after SIGTERM: Python ends at once, so never reached
    c10d's rendezvous   --standalone has one in a store on loopback; it is gone through again on each restart
One is not: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. By default torch 2.13.0's agent gives restarted ranks the store that
the dead ones filled; Gloo finds the dead ones' addresses in it, and all hang.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile

import recover
from recover import RANKS


# ---- a rank

def train(folder, checkpoint):
    recover.end_with_parent()
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    import torch.nn.functional as F

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    model, data, target, optimizer = recover.make_training(rank)
    file = recover.StepFile(folder, rank)
    step = 0
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = nn.parallel.DistributedDataParallel(model)
    while True:
        optimizer.zero_grad()
        F.cross_entropy(ddp(data), target).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
        file.add(step, RANKS)


# ---- the driver

def start(folder, checkpoint, options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
               "--nproc-per-node", str(RANKS), "--max-restarts", str(2 * options.kills), os.path.abspath(__file__),
               "--worker", str(folder), "--checkpoint", checkpoint]
    with open(folder / "torchrun.log", "wb") as log:
        environment = {**recover.environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=recover.end_with_parent)


def end(job):
    job.send_signal(signal.SIGTERM)  # torchrun ends its ranks
    try:
        job.wait(40)
    except subprocess.TimeoutExpired:
        job.kill()  # and they end with it
        job.wait()


def recovery_of(record, check, rank, killed_at, old):
    """old: the 4 processes before the kill."""
    def first_steps():
        lines = [record.lines(each) for each in range(RANKS)]
        new = [next((line for line in each if line.pid not in old and line.end > killed_at), None) for each in lines]
        return new if all(new) else None

    new = recover.wait_for(first_steps, f"recovery from the kill of rank {rank}", check)
    last = max(line.step for each in range(RANKS) for line in record.lines(each) if line.pid in old)
    return recover.Recovery(rank, max(line.end for line in new) - killed_at, last + 2 - new[0].step, None)


def main():
    options = recover.parse_arguments("torchrun's recovery from SIGKILL of a rank", checkpoint={"help": argparse.SUPPRESS})
    if options.worker:
        train(options.worker, options.checkpoint)

    def run(folder):
        place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else folder
        with tempfile.TemporaryDirectory(dir=place) as checkpoints:
            job = start(folder, os.path.join(checkpoints, "checkpoint"), options)

            def check():
                if job.poll() is not None:
                    raise ChildProcessError(f"torchrun ended by itself, with {job.returncode}")

            try:
                record = recover.Record(folder)
                kills = recover.Kills(record, options, check)
                recoveries = []
                for _ in range(options.kills):
                    rank, killed_at = kills.next()
                    all_lines = [line for each in range(RANKS) for line in record.lines(each)]
                    old = {line.pid for line in all_lines if line.end < killed_at}
                    recoveries.append(recovery_of(record, check, rank, killed_at, old))
            finally:
                end(job)
        return kills, recoveries, {"checkpoint": "tmpfs" if place == "/dev/shm" else "disk"}

    recover.drive("torchrun", options, run)


main()
