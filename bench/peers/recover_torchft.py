#!/usr/bin/env python3
"""The peer of ./dev bench recover that goes on without the dead rank: torchft, on Gloo.

    build/venv/bin/python3 bench/peers/recover_torchft.py [--kills K] [--json]

4 replica groups of 1 rank each; a killed one is started again at once, and fetches weights and optimizer state from a
survivor. Times are those of survivors: see recover.py. The lighthouse is the command torchft_lighthouse, on loopback.

Settings are torchft's defaults. These matter:
    heartbeat_interval    100 ms   of Manager: how often a replica shows that it lives
    heartbeat_timeout_ms  5000     of the lighthouse: after so long without, a replica is dead
    join_timeout_ms       60000    of the lighthouse: so long a new quorum waits for replicas that it takes for alive,
                                   so also for the dead one until its heartbeat times out. The class
                                   LighthouseServer, which is for tests, has 100; on a busy machine a rank is late by
                                   more, and the quorum changes at every step
    quorum_tick_ms        100      of the lighthouse: how often it looks
    quorum_timeout        60 s     of Manager: so long a replica waits for a quorum, then it ends by an exception
    use_async_quorum      True     the quorum is found during the forward; a newcomer's first step counts for nothing
min_replicas and min_replica_size have no default: 3, so that survivors go on, and no fewer.
One is not a default: the timeout of ProcessGroupGloo, 5 s as in torchft's own train_ddp.py, instead of 60 s. Gloo
tells the dead rank's neighbours in the ring of its end, not the rank opposite, which waits for that long; with 60 s,
the neighbours' quorum_timeout runs out at the same time, and they can end too.
--heartbeat-timeout-ms, --join-timeout-ms and --gloo-timeout take others.

torchft 0.2.0 cannot do it: there the hook of DistributedDataParallel raises when a collective fails, so survivors die.
"""

import argparse
import datetime
import importlib.metadata
import os
import socket
import subprocess
import sys

import recover
from recover import RANKS


# ---- a rank

def train(folder, rank, gloo_timeout):
    socket.gethostname = lambda: "127.0.0.1"  # where torchft says that it is
    import torch.distributed as dist
    import torch.nn.functional as F
    import torchft

    model, data, target, optimizer = recover.make_training(rank)
    file = recover.StepFile(folder, rank)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(datetime.timedelta(seconds=gloo_timeout)),
        load_state_dict=load, state_dict=state, min_replica_size=RANKS - 1,
        replica_id=f"rank_{rank}", rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port)
    ddp = torchft.DistributedDataParallel(manager, model)
    managed = torchft.Optimizer(manager, optimizer)
    while True:
        managed.zero_grad()
        F.cross_entropy(ddp(data), target).backward()
        before = manager.current_step()
        managed.step()
        is_kept = manager.current_step() > before
        file.add(manager.current_step(), manager.num_participants(), is_kept)


# ---- the driver

def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Job:
    def __init__(self, folder, options):
        self.folder, self.options, self.environment = folder, options, recover.environment()
        port = free_port()
        command = [os.path.join(os.path.dirname(sys.executable), "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}",
                   "--min_replicas", str(RANKS - 1)]
        command += ["--join_timeout_ms", str(options.join_timeout_ms)]
        command += ["--heartbeat_timeout_ms", str(options.heartbeat_timeout_ms)]
        self.environment["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
        self.lighthouse = self.start(command, "lighthouse")
        self.ranks = [self.start_rank(rank) for rank in range(RANKS)]

    def start(self, command, name):
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=self.environment,
                                    preexec_fn=recover.end_with_parent)

    def start_rank(self, rank):
        command = [sys.executable, os.path.abspath(__file__), "--worker", str(self.folder), "--rank", str(rank),
                   "--gloo-timeout", str(self.options.gloo_timeout)]
        return self.start(command, f"rank{rank}")

    def replace(self, rank):
        self.ranks[rank].wait()
        self.ranks[rank] = self.start_rank(rank)

    def check(self):
        named = {"the lighthouse": self.lighthouse, **{f"rank {i}": rank for i, rank in enumerate(self.ranks)}}
        for name, process in named.items():
            if process.poll() is not None:
                raise ChildProcessError(f"{name} ended by itself, with {process.returncode}")

    def end(self):
        for process in [*self.ranks, self.lighthouse]:
            process.kill()
            process.wait()


def recovery_of(record, job, rank, killed_at):
    """Waits until survivors are 4 again, then looks at what they did meanwhile."""
    survivors = [other for other in range(RANKS) if other != rank]

    def find(survivor):
        lines = [line for line in record.lines(survivor) if line.end > killed_at]
        kept = [line for line in lines if line.is_kept]
        without = next((i for i, line in enumerate(kept) if line.ranks < RANKS), None)
        if without is None:
            return None
        full = next((i for i, line in enumerate(kept) if i > without and line.ranks == RANKS), None)
        if full is None:
            return None
        gaps = [b.end - a.end for a, b in zip(kept[without:full], kept[without + 1 : full + 1])]
        return kept[without].end - killed_at, sum(not line.is_kept for line in lines), max(gaps)

    recover.wait_for(lambda: all(find(survivor) for survivor in survivors), f"recovery from the kill of rank {rank}",
                     job.check)
    found = [find(survivor) for survivor in survivors]
    return recover.Recovery(rank, max(each[0] for each in found), sum(each[1] for each in found) / len(found),
                            max(each[2] for each in found))


def main():
    options = recover.parse_arguments(
        "torchft's recovery from SIGKILL of a rank",
        join_timeout_ms={"type": int, "default": 60000, "help": "of the lighthouse"},
        heartbeat_timeout_ms={"type": int, "default": 5000, "help": "of the lighthouse"},
        gloo_timeout={"type": float, "default": 5.0, "help": "seconds, of a collective"},
        rank={"type": int, "help": argparse.SUPPRESS})
    if options.worker:
        train(options.worker, options.rank, options.gloo_timeout)

    def run(folder):
        job = Job(folder, options)
        try:
            record = recover.Record(folder)
            kills = recover.Kills(record, options, job.check)
            recoveries = []
            for _ in range(options.kills):
                rank, killed_at = kills.next()
                job.replace(rank)
                recoveries.append(recovery_of(record, job, rank, killed_at))
        finally:
            job.end()
        notes = {"heartbeat_timeout_ms": options.heartbeat_timeout_ms, "join_timeout_ms": options.join_timeout_ms,
                 "gloo_timeout_s": options.gloo_timeout, "torchft": version()}
        return kills, recoveries, notes

    recover.drive("torchft", options, run)


def version():
    for name in ("torchft", "torchft-nightly"):
        try:
            return f"{name}-{importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    sys.exit("bench: there is no torchft")


main()
