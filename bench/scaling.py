#!/usr/bin/env python3
"""How training scales: over ranks of this host, and over hosts of a network of 1 Gbit/s.

  build/venv/bin/python3 bench/scaling.py [--ranks 1,2] [--hosts 2,3,4] [--rounds N] [--json]

Ranks: samples a second of examples/fashion_mnist (a CNN, one thread for each rank), in turns with as many
processes that do not communicate, which is what the machine allows; `quiet` compares the fastest rounds, as a step
takes as long as on the rank that something else disturbs. Hosts: an
all-reduce of 25 MiB over hosts that are network namespaces (bench/hosts.cpp; root), beside what the network
allows (docs/scaling.md): bytes 2 P (H-1)/H at 125 MB/s.
"""

import argparse
import concurrent.futures
import json
import os
import re
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.path.join(HERE, "..", "build", "release")
TRAIN = f"{BUILD}/examples/fashion_mnist"
IS_QUICK = "LOCKSTEP_BENCH_QUICK" in os.environ


def output_of(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def samples_per_second(text):
    return float(re.search(r"ranks?: ([0-9.]+) samples/s", text)[1])


def together(ranks, steps):
    return samples_per_second(output_of([f"{BUILD}/bin/lockstep", "run", "-n", str(ranks), "--", TRAIN, "--steps", steps]))


def apart(count, steps):
    """As many worlds of one, on a core each: what the machine allows."""
    cores = sorted(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        commands = [["taskset", "-c", str(cores[i % len(cores)]), TRAIN, "--steps", steps] for i in range(count)]
        return sum(map(samples_per_second, pool.map(output_of, commands)))


def over_ranks(counts, rounds, steps):
    speeds = {(way, count): [] for count in counts for way in ((together, apart) if count > 1 else (together,))}
    for turn in range(rounds):
        for way, count in speeds if turn % 2 == 0 else reversed(speeds):
            speeds[way, count].append(way(count, str(steps)))
    one = speeds[together, counts[0]]
    for (way, count), own in speeds.items():
        yield {"bench": "scaling", "over": "ranks" if way is together else "processes apart", "count": count,
               "samples_per_second": statistics.median(own),
               "times": counts[0] * statistics.median(own) / statistics.median(one),
               "quiet_times": counts[0] * max(own) / max(one)}


def over_hosts(counts, rounds):
    for count in counts:
        rows = output_of([f"{BUILD}/bench/hosts", "--json", "--hosts", str(count), "--ranks", "2", "--rounds",
                          str(rounds), "--only", "all_reduce_25"])
        paper = 2 * 25 * 2**20 * (count - 1) / count / 125e6 * 1e3
        for row in map(json.loads, rows.splitlines()):
            yield {"bench": "scaling", "over": "hosts", "count": count, "engine": row["peer"], "ms": row["ms"],
                   "paper_ms": paper}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(one) for one in text.split(",")]
    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument("--hosts", type=numbers, default=[2] if IS_QUICK else [2, 3, 4])
    parser.add_argument("--rounds", type=int, default=1 if IS_QUICK else 7)
    parser.add_argument("--json", action="store_true", help="one object a row")
    options = parser.parse_args()
    if not options.json:
        print(f"# fashion_mnist, one thread for each rank, {os.cpu_count()} cores; median of {options.rounds} rounds.")
        print(f"#{'':>6}{'':>16}{'samples/s':>12}{'times one':>12}{'quiet':>9}")
    for row in over_ranks(options.ranks, options.rounds, 20 if IS_QUICK else 250):
        print(json.dumps(row) if options.json else
              f" {row['count']:>6} {row['over']:<16}{row['samples_per_second']:>12.0f}{row['times']:>12.2f}{row['quiet_times']:>9.2f}", flush=True)
    if os.geteuid() != 0:
        print("# Without hosts: network namespaces need root.", file=sys.stderr)
        return
    if not options.json:
        print(f"\n# All-reduce of 25 MiB, hosts of 2 ranks, 1 Gbit/s from each.\n#{'hosts':>6}  {'engine':<14}{'ms':>8}{'on paper':>10}")
    for row in over_hosts(options.hosts, 1 if IS_QUICK else 2):
        print(json.dumps(row) if options.json else
              f" {row['count']:>6}  {row['engine']:<14}{row['ms']:>8.1f}{row['paper_ms']:>10.1f}", flush=True)


main()
