#!/usr/bin/env python3
"""A GPT that learns to write C++: examples/gpt.cpp against its twin on Python's DDP.

    ./dev bench gpt [--steps N] [--rounds N] [--bf16] [--json]

Both train on 2 ranks of one core each, started by `lockstep run`, from the same weights, on the same
samples in the same order; peers/gpt.py is the twin, on Gloo. In each round both have one run, in
alternating order. A step is everything from one line of the loss file to the next: batches, 2
forwards and backwards, averaging, clipping, AdamW, the schedule, and the mean of the loss over ranks.
Ratios between columns of one run are results, if nothing else runs; absolute times are not.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOCKSTEP = str(ROOT / "build/release/bin/lockstep")
PYTHON = str(ROOT / "build/venv/bin/python3")
PEERS = {"lockstep": [str(ROOT / "build/release/examples/gpt")],
         "python": [PYTHON, str(ROOT / "bench/peers/gpt.py")]}
QUICK = "LOCKSTEP_BENCH_QUICK" in os.environ
WINDOW = 10  # steps that are timed together: the loss files' times are whole milliseconds
TOLERANCE = 1e-3  # for losses of sums that are rounded elsewhere; with another seed it is 0.3


def gather_headers(path):
    """What examples/gpt.cpp trains on by default."""
    folders = [folder for folder in pathlib.Path("/usr/include/c++").glob("*") if folder.name.isdigit()]
    if not folders:
        sys.exit("bench: /usr/include/c++ is empty: give --text FILE")
    newest = max(folders, key=lambda folder: int(folder.name))
    with open(path, "wb") as text:
        for header in sorted(newest.iterdir()):
            if header.is_file():
                text.write(header.read_bytes())


def train(peer, folder, arguments):
    """The losses of all steps, and the ms per step of each window but the first."""
    file = pathlib.Path(tempfile.mkstemp(dir=folder)[1])
    command = [LOCKSTEP, "run", "-n", "2", "--", *PEERS[peer], *arguments, "--loss-file", file]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"bench: {peer} failed:\n{done.stderr}")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    ends = [line["time"] * 1e3 for line in lines[WINDOW - 1 :: WINDOW]]
    return [line["loss"] for line in lines], [(b - a) / WINDOW for a, b in zip(ends, ends[1:])]


def others_seconds():
    """CPU time of processes that are not ours."""
    with open("/proc/stat") as stat:
        user, nice, system = map(int, stat.readline().split()[1:4])
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - ours.ru_utime - ours.ru_stime


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", help="a file, instead of the C++ standard library's headers")
    parser.add_argument("--steps", type=int, default=30 if QUICK else 150)
    parser.add_argument("--rounds", type=int, default=1 if QUICK else 3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="forwards in autocast")
    parser.add_argument("--json", action="store_true", help="one object a row")
    options = parser.parse_args()
    if options.steps < 2 * WINDOW or options.rounds < 1:
        sys.exit(f"bench: give {2 * WINDOW} steps and 1 round, or more")

    def say(text, **row):
        if row and options.json:
            print(json.dumps({"bench": "gpt", **row}), flush=True)
        elif not options.json:
            print(text, flush=True)

    with open("/proc/cpuinfo") as info:
        cpu = next((line.split(": ")[1].strip() for line in info if "model name" in line), "unknown CPU")
    torch = output_of(PYTHON, "-c", "import importlib.metadata as m; print(m.version('torch'))")
    say(f"# GPT of 0.8 M parameters{' in bf16' if options.bf16 else ''}, 2 ranks x 1 thread, {options.rounds} "
        f"rounds of {options.steps} steps, the first {WINDOW} not timed\n"
        f"# {cpu}, {os.cpu_count()} cores; torch {torch}; "
        f"commit {output_of('git', 'describe', '--always', '--dirty')}\n#")

    curves = {peer: [] for peer in PEERS}
    times = {peer: [] for peer in PEERS}
    begin, others = time.monotonic(), others_seconds()
    with tempfile.TemporaryDirectory() as folder:
        text = options.text or f"{folder}/headers"
        if not options.text:
            gather_headers(text)
        arguments = ["--text", text, "--steps", str(options.steps), "--seed", str(options.seed)]
        arguments += ["--bf16"] if options.bf16 else []
        for round_number in range(options.rounds):
            for peer in sorted(PEERS, reverse=round_number % 2 == 1):
                losses, windows = train(peer, folder, arguments)
                curves[peer].append(losses)
                times[peer] += windows
    others = (others_seconds() - others) / (time.monotonic() - begin)

    say("# loss: step     lockstep       python   difference")
    ours, theirs = curves["lockstep"][0], curves["python"][0]
    for step in range(1, options.steps + 1):
        if not options.json and step not in (1, 2, 5, 10, 20, options.steps) and step % 50:
            continue
        one, other = ours[step - 1], theirs[step - 1]
        say(f"{step:12}{one:13.6f}{other:13.6f}{abs(one - other):13.1e}",
            what="loss", step=step, lockstep=one, python=other)
    differences = [abs(one - other) for one, other in zip(ours, theirs)]
    largest, mean = max(differences), statistics.fmean(differences)
    same = {peer: all(curve == each[0] for curve in each) for peer, each in curves.items()}
    say(f"# All steps: largest difference {largest:.1e}, mean {mean:.1e}.",
        what="curves", largest=largest, mean=mean)
    if options.rounds > 1:
        say("# Every round the same bits: " + ", ".join(
            f"{peer} {'yes' if is_same else 'NO'}" for peer, is_same in same.items()) + ".",
            what="same bits in every round", **same)

    say("#\n# ms per step    lockstep       python   python / lockstep")
    middle = {peer: statistics.median(each) for peer, each in times.items()}
    quiet = {peer: sorted(each)[len(each) // 10] for peer, each in times.items()}
    for name, ms in {"median": middle, "quiet": quiet}.items():
        say(f"{name:>12}{ms['lockstep']:13.1f}{ms['python']:13.1f}{ms['python'] / ms['lockstep']:20.2f}",
            what=f"ms per step, {name}", **ms, ratio=ms["python"] / ms["lockstep"])
    say(f"# quiet: the fastest tenth. Other programs used {others:.2f} cores meanwhile"
        f"{', so repeat it when they have ended' if others > 0.1 else ''}.",
        what="cores used by other programs", cores=others)
    is_good = largest < TOLERANCE and same["lockstep"]
    say(f"# Losses differ by less than {TOLERANCE}, rounds by nothing: {'OK' if is_good else 'FAILED'}")
    sys.exit(0 if is_good else 1)


main()
