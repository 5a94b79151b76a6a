#!/usr/bin/env python3
"""What `lockstep run` costs: starting ranks, noticing a death, waiting.

    ./dev bench launch [--json]

Peers take turns in the same run: the same programs started by fork + exec alone, by mpirun and by
torchrun where they are installed. Ratios and differences between rows are results; absolute times
are not. The program is /bin/true, which does nothing.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOCKSTEP = str(ROOT / "build/release/bin/lockstep")
QUICK = "LOCKSTEP_BENCH_QUICK" in os.environ


def start_directly(ranks):
    for process in [subprocess.Popen(["/bin/true"]) for _ in range(ranks)]:
        process.wait()


def start_with(*command):
    def start(ranks):
        subprocess.run([*command, str(ranks), *TAIL[command[0]]], check=True, capture_output=True,
                       timeout=60)

    return start


MPIRUN = shutil.which("mpirun") or "mpirun"
TORCHRUN = str(ROOT / "build/venv/bin/torchrun")
TAIL = {LOCKSTEP: ["--", "/bin/true"], MPIRUN: ["/bin/true"], TORCHRUN: ["--no-python", "/bin/true"]}


def measure_start(ranks, rounds):
    peers = {"fork + exec": (start_directly, 1), "lockstep run": (start_with(LOCKSTEP, "run", "-n"), 1)}
    if shutil.which("mpirun") and ranks <= 2:  # with 64 it has been seen to hang
        peers["mpirun"] = (start_with(MPIRUN, "--oversubscribe", "--allow-run-as-root", "-n"), 10)
    if os.access(TORCHRUN, os.X_OK) and ranks <= 2:
        peers["torchrun"] = (start_with(TORCHRUN, "--standalone", "--nproc-per-node"), 20)
    times = {name: [] for name in peers}
    for round_number in range(rounds):
        for name, (start, every) in peers.items():  # slow ones have fewer turns
            if round_number % every == 0:
                begin = time.perf_counter()
                start(ranks)
                times[name].append((time.perf_counter() - begin) * 1e3)
    base = statistics.median(times["fork + exec"])
    for name, values in times.items():
        middle = statistics.median(values)
        yield {"bench": "launch", "what": f"start and end of {ranks} ranks", "peer": name,
               "ms": middle, "over_fork_exec_ms": middle - base}


def children_of(pid):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = pathlib.Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry))
    return found


def measure_death(rounds):
    """From SIGKILL of a rank to the launcher's end; the others end at SIGTERM."""
    times = []
    for _ in range(rounds):
        job = subprocess.Popen([LOCKSTEP, "run", "-n", "4", "--", "sleep", "600"],
                               stderr=subprocess.DEVNULL)
        while True:
            ranks = [rank for worker in children_of(job.pid) for rank in children_of(worker)]
            if len(ranks) == 4:
                break
            time.sleep(0.005)
        time.sleep(0.05)
        begin = time.perf_counter()
        os.kill(ranks[1], signal.SIGKILL)
        job.wait()
        times.append((time.perf_counter() - begin) * 1e3)
    yield {"bench": "launch", "what": "death of a rank to the last process gone", "peer": "lockstep run",
           "ms": statistics.median(times), "worst_ms": max(times)}


def measure_waiting(seconds):
    job = subprocess.Popen([LOCKSTEP, "run", "-n", "2", "--", "sleep", str(seconds + 2)])
    time.sleep(1)
    processes = [job.pid, *children_of(job.pid)]

    def ticks():
        fields = [pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                  for pid in processes]
        return sum(int(each[11]) + int(each[12]) for each in fields)

    def kilobytes():
        lines = [line for pid in processes
                 for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))

    before = ticks()
    time.sleep(seconds)
    yield {"bench": "launch", "what": f"waiting for {seconds} s", "peer": "lockstep run",
           "cpu_ms": (ticks() - before) * 1e3 / os.sysconf("SC_CLK_TCK"), "memory_mb": kilobytes() / 1024}
    job.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="one object a row")
    options = parser.parse_args()
    rounds = 3 if QUICK else 30
    rows = [measure_start(2, rounds), measure_start(64, max(2, rounds // 6)),
            measure_death(2 if QUICK else 10), measure_waiting(1 if QUICK else 10)]
    for group in rows:
        for row in group:
            if options.json:
                print(json.dumps(row))
            else:
                rest = ", ".join(f"{name} {value:.1f}" for name, value in row.items()
                                 if isinstance(value, float))
                print(f"{row['what']:<42} {row['peer']:<14} {rest}")
            sys.stdout.flush()


main()
