#!/usr/bin/env python3
"""Plots of the benchmarks' rows: build/venv/bin/python3 bench/plot.py ROWS FOLDER

ROWS is a file with the objects that the benchmarks print with --json, one a line; each plot that has rows in it
becomes an SVG file in FOLDER.
"""

import json
import os
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
                            "svg.hashsalt": "lockstep", "axes.grid": True, "grid.alpha": 0.3})
COLOURS = {"lockstep": "#1b6ac9", "gloo": "#e0812b", "openmpi": "#6a9f3a", "c10d": "#9a9a9a", "python": "#c94f4f",
           "paper": "#444444"}


def save(figure, folder, name):
    figure.tight_layout()
    figure.savefig(os.path.join(folder, name), metadata={"Date": None})
    print(os.path.join(folder, name))


def all_reduce(rows, folder):
    rows = [row for row in rows if row["bench"] == "all_reduce" and row["dtype"] == "f32" and row["ranks"] == 2]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(6, 3.4))
    for engine, mode, label, colour in (("shm", "zero_copy", "lockstep", "lockstep"), ("gloo", None, "Gloo", "gloo"),
                                        ("openmpi", None, "OpenMPI", "openmpi")):
        own = sorted((row["bytes"], row["p50_us"]) for row in rows
                     if row["engine"] == engine and mode in (None, row["mode"]))
        if own:
            axes.plot(*zip(*own), marker="o", markersize=3, label=label, color=COLOURS[colour])
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds",
             title="All-reduce of f32 on 2 ranks of one host: less is better")
    axes.legend(frameon=False)
    save(figure, folder, "allreduce.svg")


def steps(rows, folder):
    rows = [row for row in rows if row["bench"] == "ddp" and row["ranks"] == 2]
    models = [model for model in ("mlp", "cnn", "gpt", "gpt2") if any(row["model"] == model for row in rows)]
    if not models:
        return
    peers = (("lockstep", "lockstep", "lockstep"), ("c10d_reducer_view", "c10d::Reducer, C++", "c10d"),
             ("python_ddp_view", "Python DDP", "python"))
    figure, axes = plt.subplots(figsize=(6, 3.2))
    for place, (peer, label, colour) in enumerate(peers):
        heights = []
        for model in models:
            times = {row["peer"]: row["ms_per_step"] for row in rows if row["model"] == model}
            heights.append(times.get(peer, 0) / times["barrier"] if "barrier" in times else 0)
        spots = [index + (place - 1) * 0.27 for index in range(len(models))]
        bars = axes.bar(spots, heights, 0.25, label=label, color=COLOURS[colour])
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    names = {"mlp": "MLP, 85 k", "cnn": "CNN, 1.2 M", "gpt": "GPT, 10.8 M", "gpt2": "GPT-2, 124 M"}
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(models)), [names[model] for model in models])
    axes.set(ylabel="times the bound", title="A training step on 2 ranks of one host: 1 is a bare barrier")
    axes.grid(axis="x", visible=False)
    axes.legend(frameon=False)
    save(figure, folder, "steps.svg")


def scaling(rows, folder):
    rows = [row for row in rows if row["bench"] == "scaling"]
    if not rows:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3))
    ranks = sorted((row["count"], row["times"]) for row in rows if row["over"] == "ranks")
    counts = [count for count, _ in ranks]
    apart = sorted((row["count"], row["times"]) for row in rows if row["over"] == "processes apart")
    left.plot(*zip(ranks[0], *apart), color=COLOURS["paper"], linestyle=":", label="processes that do not communicate")
    left.plot(*zip(*ranks), marker="o", color=COLOURS["lockstep"], label="fashion_mnist")
    left.set_xticks(counts)
    left.set(xlabel="ranks of one host", ylabel="times one rank's samples/s", title="Ranks", ylim=(0, None))
    left.legend(frameon=False)
    hosts = [row for row in rows if row["over"] == "hosts"]
    for engine, label, colour in (("hierarchical", "lockstep", "lockstep"), ("gloo", "flat Gloo", "gloo")):
        own = sorted((row["count"], row["ms"]) for row in hosts if row["engine"] == engine)
        if own:
            right.plot(*zip(*own), marker="o", color=COLOURS[colour], label=label)
    if hosts:
        paper = sorted({(row["count"], row["paper_ms"]) for row in hosts})
        right.plot(*zip(*paper), color=COLOURS["paper"], linestyle=":", label="on paper")
        right.set_xticks([count for count, _ in paper])
    right.set(xlabel="hosts, 1 Gbit/s each", ylabel="ms", title="All-reduce of 25 MiB, 2 ranks on each", ylim=(0, None))
    right.legend(frameon=False)
    save(figure, folder, "scaling.svg")


def loss_curves(rows, folder):
    rows = sorted((row["step"], row["lockstep"], row["python"]) for row in rows
                  if row["bench"] == "gpt" and row["what"] == "loss")
    if not rows:
        return
    steps_, ours, theirs = zip(*rows)
    figure, axes = plt.subplots(figsize=(6, 3))
    axes.plot(steps_, theirs, color=COLOURS["python"], linewidth=4, alpha=0.5, label="Python DDP")
    axes.plot(steps_, ours, color=COLOURS["lockstep"], linewidth=1.2, label="lockstep")
    axes.set(xlabel="step", ylabel="loss", title="examples/gpt and its Python twin on 2 ranks", ylim=(0, None))
    axes.legend(frameon=False)
    save(figure, folder, "gpt.svg")


def main():
    with open(sys.argv[1]) as lines:
        rows = [json.loads(line) for line in lines if line.startswith("{")]
    os.makedirs(sys.argv[2], exist_ok=True)
    for plot in (all_reduce, steps, scaling, loss_curves):
        plot(rows, sys.argv[2])


main()
