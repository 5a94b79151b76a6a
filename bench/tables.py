#!/usr/bin/env python3
"""The benchmarks' rows as tables of the docs: python3 bench/tables.py ROWS FILE...

ROWS is a file with the objects that the benchmarks print with --json, one a line. In each FILE, what stands between
<!-- bench NAME --> and <!-- end --> is replaced by the table of that name, if there are rows for it.
"""

import json
import re
import sys

SIZES = {0: "", 8: "8 B", 1024: "1 KiB", 16384: "16 KiB", 65536: "64 KiB", 1 << 20: "1 MiB", 25 << 20: "25 MiB",
         100 << 20: "100 MiB"}
MODELS = {"mlp": "MLP, 85 k", "cnn": "CNN, 1.2 M", "gpt": "GPT, 10.8 M", "gpt2": "GPT-2 small, 124 M",
          "gpt2_medium": "GPT-2 medium, 355 M", "many": "1000 tensors of 10"}
PEERS = ["limit", "barrier", "lockstep", "lockstep_gradients", "c10d_reducer", "c10d_reducer_view", "python_ddp", "python_ddp_view"]


def table(head, rows):
    rows = list(rows)
    if not rows:
        return None
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def number(value):
    """Three digits that count."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.2f}"


def times(ratio):
    return f"{ratio:.0f} x" if ratio >= 10 else f"{ratio:.1f} x"


class Rows:
    def __init__(self, rows):
        self.rows = rows

    def of(self, **keys):
        return [row for row in self.rows if all(row.get(key) == value for key, value in keys.items())]

    def one(self, key, **keys):
        found = self.of(**keys)
        return found[0].get(key) if found else None

    def collectives(self, ranks, names):
        head = ["bytes", "shm zero-copy", "shm staged", "Gloo", "engine zero-copy", "engine staged", "OpenMPI",
                "Gloo / shm zero-copy", "OpenMPI / engine zero-copy", "OpenMPI / engine staged"]
        rows = []
        for name in names:
            for size in sorted({row["bytes"] for row in self.of(bench=name, ranks=ranks, dtype="f32")}):
                us = lambda engine, mode: self.one("p50_us", bench=name, ranks=ranks, dtype="f32", bytes=size,
                                                   engine=engine, mode=mode)
                ours, raw, raw_staged = us("shm", "zero_copy"), us("shm_engine", "zero_copy"), us("shm_engine", "staged")
                gloo, mpi = us("gloo", "staged"), us("openmpi", "staged")
                label = SIZES.get(size, str(size))
                rows.append([label if len(names) == 1 else f"{name} {label}".strip(),
                             *map(number, (ours, us("shm", "staged"), gloo, raw, raw_staged, mpi)),
                             *(times(peer / own) if peer and own else "" for peer, own in
                               ((gloo, ours), (mpi, raw), (mpi, raw_staged)))])
        return table(head, rows)

    def steps(self, key):
        present = [model for model in MODELS if self.of(bench="ddp", model=model)]
        head = ["", *PEERS, "lockstep over barrier"] if key != "peak_mb" else ["", *PEERS]
        rows = []
        for model in present:
            value = {peer: self.one(key, bench="ddp", model=model, peer=peer) for peer in PEERS}
            cells = [MODELS[model], *(number(value[peer]) for peer in PEERS)]
            if key != "peak_mb":
                bound, own = value["barrier"], value["lockstep"]
                cells.append(f"{100 * (own / bound - 1):+.1f} %" if bound and own else "")
            rows.append(cells)
        return table(head, rows)

    def alone(self):
        rows = []
        for model in MODELS:
            plain, own = (self.one("quiet_ms", bench="ddp", model=model, peer=peer) for peer in ("plain", "world_of_one"))
            if plain and own:
                rows.append([MODELS[model], number(plain), number(own), f"{100 * (own / plain - 1):+.1f} %"])
        return table(["quiet ms", "plain LibTorch", "world of one", ""], rows)

    def gpt(self):
        rows = []
        for name in ("median", "quiet"):
            for row in self.of(bench="gpt", what=f"ms per step, {name}"):
                rows.append([name, number(row["lockstep"]), number(row["python"]), f"{row['ratio']:.2f} x"])
        return table(["ms per step", "lockstep", "Python DDP", ""], rows)

    def of_host(self, show):
        """One row for each model and number of ranks, one column for each peer that trains."""
        found = self.of(bench="memory")
        peers = list(dict.fromkeys(row["peer"] for row in found if not row["peer"].endswith("bare")))
        rows = []
        for model, ranks in dict.fromkeys((row["model"], row["ranks"]) for row in found):
            cells = [self.of(bench="memory", model=model, ranks=ranks, peer=peer) for peer in peers]
            rows.append([MODELS[model], str(ranks), *(show(cell[0]) if cell else "" for cell in cells)])
        return table(["", "ranks", *peers], rows)

    @staticmethod
    def of_host_mb(row):
        if row["above_bare_mb"] is not None:
            return number(row["above_bare_mb"])
        return "does not fit" if "no_room" in row else ""

    @staticmethod
    def of_host_ratio(row):
        if row["x_replicated"] is None:
            return ""
        return f"{'' if row['is_replicated_measured'] else '~'}{row['x_replicated']:.2f}"

    @staticmethod
    def of_host_step(row):
        if row["ms_per_step"] is None:
            return ""
        return number(row["ms_per_step"]) + (f" ({row['x_barrier']:.2f})" if row["x_barrier"] else "")

    def logical(self):
        limit = lambda value, digits: f" (at most {value:.{digits}f})" if value is not None else ""
        return table(["", "ranks", "turns", "plain, ms", "logical, ms", "logical / plain", "quiet",
                      "copies of gradients more in a rank", "wrong"],
                     ([MODELS[row["model"]], str(row["ranks"]), str(row["turns"]), number(row["plain_ms"]), number(row["ms"]),
                       f"{row['times']:.3f}{limit(row['most_times'], 2)}", f"{row['quiet_times']:.3f}",
                       f"{row['copies']:.2f}{limit(row['most_copies'], 0)}" if row["copies"] is not None else "",
                       str(row["wrong"])] for row in self.of(bench="logical")))

    def hosts(self):
        return table(["", "peer", "ms", "against lockstep", "MB sent per host and step", "against the bound"],
                     ([row["what"].replace("_", " "), row["peer"], number(row["ms"]), f"{row['vs_lockstep']:.2f}",
                       number(row["wire_mb"]), f"{row['wire_mb'] / row['bound_mb']:.3f}" if row["bound_mb"] else ""]
                      for row in self.of(bench="hosts")))

    def scaling(self):
        return table(["", "samples/s", "times one rank", "quiet"],
                     ([f"{row['count']} {row['over']}", f"{row['samples_per_second']:.0f}", f"{row['times']:.2f}",
                       f"{row['quiet_times']:.2f}"] for row in self.of(bench="scaling") if row["over"] != "hosts"))

    def scaling_hosts(self):
        rows = self.of(bench="scaling", over="hosts")
        ms = {(row["count"], row["engine"]): row["ms"] for row in rows}
        return table(["all-reduce of 25 MiB, hosts of 2 ranks", "hierarchical, ms", "flat Gloo", "on paper"],
                     ([f"{count} hosts", number(ms[count, "hierarchical"]), number(ms[count, "gloo"]),
                       number(next(row["paper_ms"] for row in rows if row["count"] == count))]
                      for count in sorted({row["count"] for row in rows})))

    def launch(self):
        peers = ["fork + exec", "lockstep run", "mpirun", "torchrun"]
        whats = list(dict.fromkeys(row["what"] for row in self.of(bench="launch") if "ms" in row))
        rows = [[what, *(number(self.one("ms", bench="launch", what=what, peer=peer)) for peer in peers)]
                for what in whats]
        return table(["ms", *peers], rows)

    def recover(self):
        what = {"ranks": "4 ranks", "hosts": "2 hosts x 2 ranks", "cut": "2 hosts x 2 ranks, a cable is cut"}
        ratio = lambda value: f"{value:.1f} x" if value is not None else ""
        return table(["", "", "", "kills", "beyond the step, p50 ms", "p99 ms", "noticed, ms", "formed, ms", "steps redone",
                      "newcomer, ms", "stall, ms", "over a copy", "over a broadcast", "step, ms", "wrong"],
                     ([row["peer"], what[row["layout"]], MODELS[row["model"]], str(row["kills"]), number(row["p50_ms"]),
                       number(row["p99_ms"]), number(row.get("noticed_ms")), number(row.get("formed_ms")),
                       number(row["steps_lost"]), number(row.get("newcomer_ms")), number(row.get("stall_newcomer_ms")),
                       ratio(row.get("x_copy")), ratio(row.get("x_broadcast")), number(row["step_ms"]),
                       str(row["wrong"]) if row["wrong"] is not None else ""]
                      for row in self.of(bench="recover") if row["layout"] in what))

    def recover_cost(self):
        return table(["ms per step, nobody is lost", "without --elastic", "with --elastic", "", "quiet", "rounds"],
                     ([MODELS[row["model"]], number(row["plain_ms"]), number(row["elastic_ms"]), f"{row['percent']:+.2f} %",
                       f"{row['quiet_percent']:+.2f} %", str(row["rounds"])]
                      for row in self.of(bench="recover", layout="cost")))

    def kit(self):
        models = ["mlp", "cnn", "gpt", "many"]
        whats = list(dict.fromkeys(row["what"] for row in self.of(bench="kit") if "faster" in row))
        return table(["times faster than LibTorch's", *(MODELS[model] for model in models)],
                     ([what, *(times(ratio) if ratio else "" for ratio in
                               (self.one("faster", bench="kit", what=what, model=model) for model in models))]
                      for what in whats))

    def kit_training(self):
        rows = [row for row in self.of(bench="kit") if "waiting_percent" in row]
        return table(["the CNN on 2 ranks", "ms per step", "waits for batches, % of all time", "bar and JSON lines, %"],
                     ([row["what"], number(row["step_ms"]), f"{row['waiting_percent']:.2f}",
                       f"{row['metrics_percent']:.2f}"] for row in rows)) if rows else None

    def checkpoint(self):
        for row in self.of(bench="checkpoint", what="disk"):
            cases = (("save, `dd conv=fsync`", "save_s", "dd_s"), ("load, `cat`, from the disk", "load_s", "cat_s"),
                     ("load, `cat`, from the page cache", "load_cached_s", "cat_cached_s"))
            return table([f"{row['mb']:.0f} MB", "lockstep, s", "peer, s", "peer / lockstep"],
                         ([what, number(row[ours]), number(row[peer]), f"{row[peer] / row[ours]:.2f}"]
                          for what, ours, peer in cases))
        return None

    def summary(self):
        """What README shows: ours, a peer's, and their ratio."""
        reduce = lambda engine, mode: self.one("p50_us", bench="all_reduce", ranks=2, dtype="f32", bytes=25 << 20,
                                               engine=engine, mode=mode)
        step = lambda model, peer: self.one("ms_per_step", bench="ddp", model=model, peer=peer)
        ms = lambda us: us and us / 1000
        cases = [("all-reduce of 25 MiB, 2 ranks of one host", ms(reduce("shm", "zero_copy")), "Gloo",
                  ms(reduce("gloo", "staged"))),
                 ("the same, on raw memory", ms(reduce("shm_engine", "zero_copy")), "OpenMPI",
                  ms(reduce("openmpi", "staged")))]
        for model, name in MODELS.items():
            cases += [(f"training step, {name} parameters" if model != "many" else None, step(model, "lockstep"),
                       "Python DDP", step(model, "python_ddp"))]
        cases.append(("training step, `examples/gpt` with loader and optimizer",
                      self.one("lockstep", bench="gpt", what="ms per step, median"), "its Python twin",
                      self.one("python", bench="gpt", what="ms per step, median")))
        hosts = lambda peer: self.one("ms", bench="hosts", what="gpt", peer=peer)
        cases.append(("training step, GPT, 10.8 M, 2 hosts x 2 ranks, 1 Gbit/s", hosts("lockstep"), "Python DDP",
                      hosts("python_ddp")))
        start = lambda peer: self.one("ms", bench="launch", what="start and end of 2 ranks", peer=peer)
        cases.append(("start and end of a job of 2 ranks", start("lockstep run"), "torchrun", start("torchrun")))
        return table(["", "lockstep", "peer", ""],
                     ([what, f"{number(ours)} ms", f"{peer} {number(theirs)} ms",
                       f"**{theirs / ours:.2f} x**" if theirs < 10 * ours else f"**{theirs / ours:.0f} x**"]
                      for what, ours, peer, theirs in cases if what and ours and theirs))

    def tables(self):
        others = ["broadcast", "all_gather", "reduce_scatter", "barrier"]
        return {"all-reduce 2": self.collectives(2, ["all_reduce"]), "all-reduce 4": self.collectives(4, ["all_reduce"]),
                "collectives 2": self.collectives(2, others), "collectives 4": self.collectives(4, others),
                "steps": self.steps("ms_per_step"), "steps quiet": self.steps("quiet_ms"),
                "memory": self.steps("peak_mb"), "host memory": self.of_host(self.of_host_mb),
                "host paper": self.of_host(lambda row: f"{row['x_formula']:.2f}" if row["x_formula"] else ""),
                "host replicated": self.of_host(self.of_host_ratio), "host steps": self.of_host(self.of_host_step),
                "logical": self.logical(),
                "alone": self.alone(), "gpt": self.gpt(), "hosts": self.hosts(),
                "scaling": self.scaling(), "scaling hosts": self.scaling_hosts(), "launch": self.launch(),
                "recover": self.recover(), "recover cost": self.recover_cost(),
                "kit": self.kit(), "kit training": self.kit_training(), "checkpoint": self.checkpoint(), "summary": self.summary()}


def main():
    with open(sys.argv[1]) as file:
        tables = Rows([json.loads(line) for line in file if line.startswith("{")]).tables()
    for path in sys.argv[2:]:
        with open(path) as file:
            text = file.read()

        def fill(match):
            if match[1] not in tables:
                sys.exit(f"{path}: there is no table '{match[1]}': only {', '.join(tables)}")
            return match[0] if tables[match[1]] is None else f"<!-- bench {match[1]} -->\n{tables[match[1]]}\n<!-- end -->"

        with open(path, "w") as file:
            file.write(re.sub(r"<!-- bench (.*?) -->\n.*?<!-- end -->", fill, text, flags=re.S))


main()
