"""What recover_torchft.py and recover_torchrun.py share: the training, the record of steps, the kills, the row.

Every rank appends a line per step to a file of its own: its process, which step, CLOCK_MONOTONIC at its end, how many
ranks were averaged, and whether it was kept. The driver reads them, ends a random rank by SIGKILL at a random moment of
a step, and takes all times from the lines. Recovery of a kill: from the kill to the end of the next kept step, on the
slowest rank that is measured, minus the median of undisturbed steps. A step that the dead rank still contributed to is
not the next one. Steps lost: attempts of steps that were begun and then thrown away. Stall by the newcomer: the longest
time between two steps of a survivor, from its recovery until all ranks take part again.
"""

import argparse
import collections
import ctypes
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time

RANKS = 4
WARM_UP = 3  # steps of a new process that are not timed
STEADY = 6  # steps with all ranks before each kill; those after the warm-up are the undisturbed ones
PATIENCE = 180  # seconds for the start, and for each recovery

Line = collections.namedtuple("Line", "pid step end ranks is_kept")


# ---- in a rank

def end_with_parent():
    """No process outlives the one that started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def make_training(rank):
    """The GPT of 10.8 M parameters of bench/models.h, 4 x 128 tokens, AdamW, as bench/peers/ddp.py trains it."""
    import ddp
    import torch

    torch.set_num_threads(1)
    model, data, target = ddp.make_workload("gpt", rank)
    return model, data, target, ddp.make_optimizer(model.parameters(), is_zero=False)


class StepFile:
    def __init__(self, folder, rank):
        self.fd = os.open(pathlib.Path(folder) / f"{rank}.steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, step, ranks, is_kept=True):
        os.write(self.fd, f"{os.getpid()} {step} {time.monotonic():.6f} {ranks} {int(is_kept)}\n".encode())


# ---- in the driver

def parse_arguments(description, **extra):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, help="which ranks are killed, and when in a step")
    parser.add_argument("--json", action="store_true", help="one object a row")
    parser.add_argument("--keep", metavar="FOLDER", help="leave the record of steps and the logs there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # the folder: this process is a rank
    for name, options in extra.items():
        parser.add_argument("--" + name.replace("_", "-"), **options)
    options = parser.parse_args()
    if options.kills < 1:
        sys.exit("bench: give 1 kill, or more")
    return options


def environment():
    here = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHFT_", "TORCHELASTIC_"))}
    return {**here, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "no_proxy": "*"}


class Record:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def lines(self, rank):
        try:
            text = (self.folder / f"{rank}.steps").read_text()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind("\n") + 1].splitlines()
        fields = [line.split() for line in whole]
        return [Line(int(f[0]), int(f[1]), float(f[2]), int(f[3]), f[4] == "1") for f in fields]

    def full_steps(self, rank, after=0.0):
        """The kept steps with all ranks of the newest process, the latest that are not interrupted by others."""
        lines = self.lines(rank)
        mine = [line for line in lines if line.pid == lines[-1].pid][WARM_UP:]
        full = []
        for line in mine:
            full = full + [line] if line.ranks == RANKS and line.is_kept and line.end > after else []
        return full


def wait_for(condition, what, check):
    """Until condition() is true; check() notices a failure sooner."""
    until = time.monotonic() + PATIENCE
    while not (found := condition()):
        check()
        if time.monotonic() > until:
            raise TimeoutError(f"no {what} in {PATIENCE} s")
        time.sleep(0.05)
    return found


class Kills:
    def __init__(self, record, options, check):
        self.record, self.check = record, check
        self.random = random.Random(options.seed)
        self.last = None
        self.undisturbed = []  # seconds

    def next(self):
        """Kills a rank in a step that follows steady ones; which, and when."""
        begin = time.monotonic() if self.last is not None else 0.0

        def are_steady():
            runs = [self.record.full_steps(rank, begin) for rank in range(RANKS)]
            return runs if min(len(run) for run in runs) > STEADY else None

        runs = wait_for(are_steady, f"{STEADY} steady steps", self.check)
        times = [b.end - a.end for run in runs for a, b in zip(run, run[1:])]
        self.undisturbed += times
        self.last = self.random.choice([rank for rank in range(RANKS) if rank != self.last])
        time.sleep(self.random.uniform(0, statistics.median(times)))
        killed_at = time.monotonic()
        pid = self.record.lines(self.last)[-1].pid
        os.kill(pid, signal.SIGKILL)
        return self.last, killed_at

    def median_ms(self):
        return statistics.median(self.undisturbed) * 1e3


Recovery = collections.namedtuple("Recovery", "rank seconds steps_lost stall_newcomer")


def report(peer, options, kills, recoveries, notes):
    step_ms = kills.median_ms()
    each = sorted(recovery.seconds * 1e3 - step_ms for recovery in recoveries)
    stalls = [recovery.stall_newcomer for recovery in recoveries if recovery.stall_newcomer is not None]
    row = {"bench": "recover", "peer": peer, "model": "gpt", "ranks": RANKS, "kills": len(each),
           "p50_ms": statistics.median(each), "p99_ms": each[min(len(each) - 1, len(each) * 99 // 100)],
           "steps_lost": statistics.fmean(recovery.steps_lost for recovery in recoveries),
           "stall_newcomer_ms": max(stalls) * 1e3 if stalls else None, "step_ms": step_ms, **notes}
    row = {name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()}
    if options.json:
        print(json.dumps(row), flush=True)
        return
    print(f"# GPT of 10.8 M parameters, {RANKS} ranks x 1 thread on {os.cpu_count()} cores, an undisturbed step "
          f"{step_ms:.0f} ms; {', '.join(f'{name} {value}' for name, value in notes.items())}")
    print("# kill   rank   recovery ms   steps lost   stall by newcomer ms")
    for number, recovery in enumerate(recoveries, 1):
        stall = "-" if recovery.stall_newcomer is None else f"{recovery.stall_newcomer * 1e3:.0f}"
        ms = recovery.seconds * 1e3 - step_ms
        print(f"{number:6}{recovery.rank:7}{ms:14.0f}{recovery.steps_lost:13.2f}{stall:>23}")
    print(f"# {peer}: recovery p50 {row['p50_ms']} ms, p99 {row['p99_ms']} ms, {row['steps_lost']} steps lost per kill",
          flush=True)


def drive(peer, options, run):
    """run(folder) returns what report() takes; if it fails, the ends of the logs are shown."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes and folders are cleared away
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("*.steps")):
            sys.exit(f"bench: {folder} has the record of another run")
        try:
            report(peer, options, *run(folder))
        except (TimeoutError, ChildProcessError) as error:
            for log in sorted(folder.glob("*.log")):
                print(f"---- {log.name}", *log.read_text(errors="replace").splitlines()[-15:], sep="\n", file=sys.stderr)
            sys.exit(f"bench: {peer}: {error}")
