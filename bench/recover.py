#!/usr/bin/env python3
"""What the loss of a rank costs: `lockstep run --elastic` against torchft and torchrun.

    ./dev bench recover [--kills K] [--models mlp,gpt] [--only ranks,hosts,cost,peers] [--json]

ranks   4 ranks on this host. One is ended by SIGKILL at a random moment of a step, its replacement joins, and after some
        steps the next is. Each job loses every rank once (a rank that fails again within a minute is replaced only after
        a delay), so there are as many jobs as it takes.
hosts   The same on 2 hosts of 2 ranks (network namespaces, 1 Gbit/s from each; root), and the second host's cable is cut.
cost    Training that loses nobody, with --elastic and without, in turns, on 2 ranks. commit() is called in both.
peers   bench/peers/recover_torchft.py and recover_torchrun.py, the GPT, few kills.

beyond      from the kill to the end of the next step that is complete without the dead rank, on the slowest survivor, minus
            the median of steps with as many ranks: what the loss costs beyond the step that is done again. Its parts:
            until the slowest survivor notices, until the next generation is formed, the rest.
redone      steps that survivors had begun, or even completed, and do again, of each kill.
            A replacement that comes before survivors have noticed is in the next generation: then this includes its share.
newcomer    from main() of the replacement, when LibTorch is loaded, to the end of its first complete step. It waits for the
            end of the step under way, and does a step: `of it steps` is the median of both, one and a half steps.
stall       how long the slowest survivor stands still when it joins; x copy: over one memcpy of the state's bytes in a rank,
            x broadcast: over a broadcast of them by the engine to all ranks.
wrong       hashes of weights, one every few steps, that are not those of a run that lost nobody.
Ratios between rows of one run are results; absolute times are not. LOCKSTEP_BENCH_KEEP=FOLDER keeps what ranks wrote.
"""

import argparse
import collections
import contextlib
import ctypes
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOCKSTEP = str(ROOT / "build/release/bin/lockstep")
TRAINER = str(ROOT / "build/release/bench/recover_trainer")
PYTHON = os.environ.get("LOCKSTEP_PYTHON", str(ROOT / "build/venv/bin/python3"))
QUICK = "LOCKSTEP_BENCH_QUICK" in os.environ
RANKS = 4
WARM_UP = 2  # steps of a new process that are not timed
PATIENCE = 120  # seconds for the start, and for each recovery
SECRET = "VGhlIHNlY3JldCBvZiB0aGUgYmVuY2htYXJrcywgaW4gYmFzZTY0"


class Model:
    def __init__(self, kills, steady, hash_every, margin, cost_rounds, cost_steps):
        self.kills = kills  # in all
        self.steady = steady  # steps with all ranks before each kill
        self.hash_every = hash_every
        self.margin = margin  # steps, between the order to end and the end
        self.cost_rounds, self.cost_steps = cost_rounds, cost_steps


MODELS = {"mlp": Model(200, 100, 100, 500, 15, 1500), "gpt": Model(40, 1, 5, 2, 7, 12)}
QUICK_MODELS = {"mlp": Model(2, 50, 100, 500, 1, 200), "gpt": Model(1, 1, 5, 2, 1, 4)}
HOST_KILLS, HOST_CUTS, PEER_KILLS = (1, 1, 0) if QUICK else (20, 3, 3)
ASKED = {"ranks": {"p50_ms": 100, "p99_ms": 1000, "newcomer_beyond_ms": 1000, "x_copy": 1.2}, "hosts": {"p50_ms": 2000},
         "cut": {"p50_ms": 10000}, "cost": {"percent": 0.5}}

Step = collections.namedtuple("Step", "number end size")
Change = collections.namedtuple("Change", "generation size step joined bytes seconds redone time")


# ---- what ranks write

class Process:
    """A rank's process, as bench/recover_trainer.cpp writes it down."""

    def __init__(self, path):
        self.pid = int(path.stem)
        self.file = open(path)
        self.rest = ""
        self.seat = self.began = self.main = self.made = self.copy = None
        self.steps, self.changes, self.hashes = [], [], {}
        self.size = RANKS  # of the present generation

    def read(self):
        *lines, self.rest = (self.rest + self.file.read()).split("\n")
        for line in lines:
            kind, *words = line.split()
            if kind == "start":
                self.seat, self.began, self.main = int(words[0]), float(words[1]), float(words[2])
            elif kind == "made":
                self.made = float(words[0])
            elif kind == "step":
                self.steps.append(Step(int(words[0]), float(words[1]), int(words[2])))
            elif kind == "change":
                self.add_change(Change(*map(int, words[:5]), float(words[5]), int(words[6]), float(words[7])))
            elif kind == "hash":
                self.hashes[int(words[0])] = words[1]
            elif kind == "copy":
                self.copy = (int(words[0]), float(words[1]), float(words[2]))

    def add_change(self, change):
        # commit() does not return from a step at whose end ranks change, so the rank could not write that it is complete.
        if self.steps and not change.redone and change.step > self.steps[-1].number:
            self.steps.append(Step(change.step, change.time - change.seconds, self.size))
        self.size = change.size
        self.changes.append(change)

    def steps_since_change(self):
        """Of the present generation, without the first ones of the process."""
        began = self.changes[-1].time if self.changes else 0
        found = []
        for step in reversed(self.steps[WARM_UP:]):
            if step.end < began:
                break
            found.append(step)
        return found[::-1]

    def step_times(self):
        """Seconds of steps by the number of ranks, but for the first ones of the process and of each generation."""
        times = collections.defaultdict(list)
        changes = [change.time for change in self.changes]
        at = 0
        for a, b in zip(self.steps[WARM_UP:], self.steps[WARM_UP + 1 :]):
            while at < len(changes) and changes[at] < a.end:
                at += 1
            if at < len(changes) and changes[at] < b.end or a.size != b.size:
                continue
            times[a.size].append(b.end - a.end)
        return times


# ---- jobs

def end_with_parent():
    """No launcher outlives the bench; its ranks end with it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Job:
    """`lockstep run` with recover_trainer on one host, or on each of `hosts`."""

    def __init__(self, folder, model, options, trainer=(), hosts=None, ranks=RANKS):
        self.folder, self.hosts, self.processes, self.gone = folder, hosts, {}, set()
        command = [LOCKSTEP, "run", "-n", str(ranks // (hosts.count if hosts else 1)), *options]
        tail = ["--", TRAINER, "--model", model, "--folder", str(folder), *map(str, trainer)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_SECRET": SECRET}
        self.launchers = []
        for host in range(hosts.count if hosts else 1):
            with open(folder / f"launcher{host}.log", "wb") as log:
                line = [*hosts.prefix(host), *command, *hosts.options(host), *tail] if hosts else [*command, *tail]
                self.launchers.append(subprocess.Popen(line, stdout=log, stderr=log, env=environment,
                                                       preexec_fn=end_with_parent))

    def read(self):
        for path in self.folder.glob("*.events"):
            if path.stem not in self.processes:
                self.processes[path.stem] = Process(path)
        for process in self.processes.values():
            process.read()
        return self.processes.values()

    def alive(self):
        return [process for process in self.read() if process.pid not in self.gone and process.seat is not None]

    def wait_for(self, condition, what):
        until = time.monotonic() + PATIENCE
        while not (found := condition()):
            if self.launchers[0].poll() is not None:
                raise ChildProcessError(f"lockstep run ended with {self.launchers[0].returncode} before there were {what}")
            if time.monotonic() > until:
                raise TimeoutError(f"no {what} in {PATIENCE} s")
            time.sleep(0.02)
        return found

    def wait_until_steady(self, steps, size=RANKS):
        def are_steady():
            ranks = self.alive()
            recent = [process.steps_since_change() for process in ranks]
            return ranks if len(ranks) == size and all(len(own) > steps and own[-1].size == size for own in recent) else None

        return self.wait_for(are_steady, f"{steps} steady steps of {size} ranks")

    def finish(self, model):
        """Lets it train to a step whose hash is known."""
        last = max(process.steps[-1].number for process in self.alive() if process.steps)
        total = -(-(last + model.margin) // model.hash_every) * model.hash_every
        (self.folder / "total.new").write_text(str(total))
        (self.folder / "total.new").rename(self.folder / "total")
        if self.launchers[0].wait(PATIENCE) != 0:
            raise ChildProcessError(f"lockstep run ended with {self.launchers[0].returncode}")
        self.read()
        if total not in self.hashes():
            raise ChildProcessError(f"step {total} was not reached")

    def hashes(self):
        found = {}
        for process in self.processes.values():
            for step, value in process.hashes.items():
                found[step] = value if found.get(step, value) == value else "ranks differ"
        return found

    def end(self):
        for launcher in self.launchers:
            launcher.terminate()
        for launcher in self.launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(20)
            launcher.kill()
            launcher.wait()


@contextlib.contextmanager
def job_of(*arguments, **options):
    with tempfile.TemporaryDirectory(prefix="lockstep-recover-") as name:
        job = Job(pathlib.Path(name), *arguments, **options)
        try:
            yield job
            if keep := os.environ.get("LOCKSTEP_BENCH_KEEP"):
                subprocess.run(["cp", "-r", name, keep], check=False)
        except (TimeoutError, ChildProcessError, subprocess.TimeoutExpired):
            if keep := os.environ.get("LOCKSTEP_BENCH_KEEP"):
                subprocess.run(["cp", "-r", name, keep], check=False)
            for log in sorted(pathlib.Path(name).glob("*.log")):
                print(f"---- {log.name}", *log.read_text(errors="replace").splitlines()[-15:], sep="\n", file=sys.stderr)
            raise
        finally:
            job.end()


class Hosts:
    """Network namespaces, as tests/support/net_hosts.h makes them."""

    def __init__(self, count, fewest=None):
        self.count, self.fewest = count, fewest or count
        self.name = f"lockstep-bench-{os.getpid()}"
        self.names = [f"{self.name}-net", *(f"{self.name}-{host}" for host in range(count))]

    @staticmethod
    def run(command):
        return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout

    def __enter__(self):
        net = self.names[0]
        for command in [f"ip netns add {net}", f"ip -n {net} link add switch type bridge", f"ip -n {net} link set switch up"]:
            self.run(command)
        for host, name in enumerate(self.names[1:]):
            for command in [f"ip netns add {name}", f"ip -n {name} link set lo up",
                            f"ip -n {name} link add cable type veth peer name port{host} netns {net}",
                            f"ip -n {net} link set port{host} master switch up",
                            f"ip -n {name} addr add 10.78.0.{host + 1}/24 dev cable", f"ip -n {name} link set cable up",
                            f"tc -n {name} qdisc replace dev cable root tbf rate 1gbit burst 256kb latency 100ms"]:
                self.run(command)
        return self

    def __exit__(self, *_):
        for name in self.names:
            for pid in self.run(f"ip netns pids {name}").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            self.run(f"ip netns del {name}")

    def prefix(self, host):
        name = f"echo benchhost{host} > /proc/sys/kernel/hostname && exec \"$@\""
        return ["ip", "netns", "exec", self.names[host + 1], "unshare", "--uts", "sh", "-c", name, "sh"]

    def options(self, host):
        count = str(self.count) if self.fewest == self.count else f"{self.fewest}:{self.count}"
        return ["--hosts", count, "--host-rank", str(host), "--master", "10.78.0.1:29500"]

    def cut(self, host):
        self.run(f"ip -n {self.names[0]} link set port{host} down")


# ---- what is measured

class Losses:
    """All kills of one model in one layout."""

    def __init__(self):
        self.times = collections.defaultdict(list)  # seconds of a step, by ranks
        self.each, self.newcomers, self.stalls, self.copies, self.hashes = [], [], [], [], []

    def add_loss(self, at, survivors):
        """Parts in seconds, each on the slowest survivor; the step included."""
        found = []
        for process in survivors:
            change = next((one for one in process.changes if one.time > at), None)
            step = change and next((one for one in process.steps if one.end > change.time), None)
            if not step:
                raise ChildProcessError(f"process {process.pid} did not go on")
            done = max(one.number for one in process.steps if one.end < change.time)
            found.append((step.end - at, change.time - change.seconds - at, change.time - at, done + 1 - change.step, step.size))
        self.each.append([max(values) for values in zip(*found)])

    def add_newcomer(self, newcomer, survivors, at):
        self.newcomers.append((newcomer.steps[0].end - newcomer.main, newcomer.main - newcomer.began,
                               newcomer.made - newcomer.main, newcomer.changes[0].time - newcomer.made))
        joins = [next(one for one in process.changes if one.time > at and one.joined) for process in survivors]
        if not any(one.redone for one in joins):  # else it came before survivors had gone on without it
            self.stalls.append((max(one.seconds for one in joins), joins[0].bytes))

    def add_job(self, job):
        for process in job.processes.values():
            for size, times in process.step_times().items():
                if size == RANKS or job.hosts is not None:  # with fewer: measure_without(), where no newcomer is loading
                    self.times[size] += times
            if process.copy:
                self.copies.append(process.copy)
        self.hashes.append(job.hashes())

    def step_ms(self, size):
        return statistics.median(self.times[size]) * 1e3 if self.times[size] else None

    def row(self, wrong, **names):
        quantile = lambda values, q: sorted(values)[min(len(values) - 1, int(len(values) * q))]
        beyond = [1e3 * whole - (self.step_ms(size) or self.step_ms(RANKS)) for whole, _, _, _, size in self.each]
        row = {"bench": "recover", "peer": "lockstep", **names, "ranks": RANKS, "kills": len(beyond),
               "p50_ms": statistics.median(beyond), "p99_ms": quantile(beyond, 0.99), "worst_ms": max(beyond),
               "noticed_ms": statistics.median(one[1] for one in self.each) * 1e3,
               "formed_ms": statistics.median(one[2] - one[1] for one in self.each) * 1e3,
               "steps_lost": statistics.fmean(one[3] for one in self.each),
               "step_ms": self.step_ms(RANKS), "step_without_ms": self.step_ms(min(one[4] for one in self.each)),
               "with_newcomer": sum(one[4] == RANKS for one in self.each)}
        if self.stalls:
            whole, load, made, joined = ([one[i] * 1e3 for one in self.newcomers] for i in range(4))
            stall = statistics.median(one[0] for one in self.stalls) * 1e3
            steps = 1.5 * row["step_ms"]
            row |= {"newcomer_ms": statistics.median(whole), "newcomer_p99_ms": quantile(whole, 0.99),
                    "newcomer_beyond_ms": statistics.median(whole) - steps, "load_ms": statistics.median(load),
                    "made_ms": statistics.median(made), "joined_ms": statistics.median(joined),
                    "stall_newcomer_ms": stall, "stall_p99_ms": quantile([one[0] * 1e3 for one in self.stalls], 0.99),
                    "stalls": len(self.stalls), "state_bytes": self.stalls[0][1]}
            if self.copies:
                scale = lambda i: statistics.median(one[i] * row["state_bytes"] / one[0] for one in self.copies)
                row |= {"copy_ms": scale(1), "x_copy": stall / scale(1), "broadcast_ms": scale(2), "x_broadcast": stall / scale(2)}
        return {**row, "wrong": wrong}


def kill_each(job, model, losses, chance, most):
    """Kills ranks, each seat once, up to `most`; returns how many."""
    seats = list(range(RANKS))
    chance.shuffle(seats)
    for seat in seats[:most]:
        ranks = job.wait_until_steady(model.steady)
        times = [b.end - a.end for own in (process.steps_since_change() for process in ranks) for a, b in zip(own, own[1:])]
        victim = next(process for process in ranks if process.seat == seat)
        time.sleep(chance.uniform(0, statistics.median(times)))
        at = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        job.gone.add(victim.pid)
        survivors = [process for process in ranks if process is not victim]
        ranks = job.wait_until_steady(min(3, model.steady))
        losses.add_loss(at, survivors)
        losses.add_newcomer(next(process for process in ranks if process not in survivors), survivors, at)
    return len(seats[:most])


def measure_without(name, model, losses):
    """Steps of the ranks that are left, when nobody replaces the lost one: there are none to measure beside a newcomer."""
    with job_of(name, ["--elastic", "--no-replace", str(128 + signal.SIGKILL)], ["--hash-every", model.hash_every]) as job:
        victim = job.wait_until_steady(model.steady)[-1]
        os.kill(victim.pid, signal.SIGKILL)
        job.gone.add(victim.pid)
        job.wait_until_steady(max(10, model.steady), size=RANKS - 1)
        job.finish(model)
        for process in job.processes.values():
            losses.times[RANKS - 1] += process.step_times()[RANKS - 1]
        losses.hashes.append(job.hashes())


def count_wrong(name, model, all_hashes):
    """Against a run that loses nobody, without --elastic."""
    last = max(max(hashes) for hashes in all_hashes)
    with job_of(name, ["--logical-ranks", str(RANKS)], ["--steps", last, "--hash-every", model.hash_every], ranks=2) as job:
        if job.launchers[0].wait(30 * PATIENCE) != 0:
            raise ChildProcessError("the run without losses failed")
        job.read()
        expected = job.hashes()
    return [sum(expected.get(step) != value for step, value in hashes.items()) for hashes in all_hashes]


def measure(name, model, kills, cuts, chance):
    """Rows for one model: ranks of one host, or with cuts of hosts."""
    layouts = {"ranks": Losses()} if cuts is None else {"hosts": Losses(), "cut": Losses()}
    trainer = ["--hash-every", model.hash_every]
    losses = next(iter(layouts.values()))
    while kills > 0:
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(Hosts(2)) if cuts is not None else None
            job = stack.enter_context(job_of(name, ["--elastic"], trainer, hosts=hosts))
            kills -= kill_each(job, model, losses, chance, kills)
            job.finish(model)
            losses.add_job(job)
    if cuts is None:
        measure_without(name, model, losses)
    for _ in range(cuts or 0):
        with Hosts(2, fewest=1) as hosts, job_of(name, ["--elastic"], trainer, hosts=hosts) as job:
            ranks = job.wait_until_steady(model.steady)
            at = time.monotonic()
            hosts.cut(1)
            survivors = [process for process in ranks if process.seat < RANKS // 2]
            job.gone |= {process.pid for process in ranks if process not in survivors}
            job.wait_until_steady(model.steady, size=RANKS // 2)
            layouts["cut"].add_loss(at, survivors)
            job.finish(model)
            layouts["cut"].add_job(job)
    layouts = {layout: own for layout, own in layouts.items() if own.each}
    wrong = count_wrong(name, model, [hashes for own in layouts.values() for hashes in own.hashes])
    for layout, own in layouts.items():
        of_this, wrong = wrong[: len(own.hashes)], wrong[len(own.hashes) :]
        yield own.row(sum(of_this), model=name, layout=layout)


def measure_cost(name, model, rounds, ranks=2):
    """Medians of steps, of a run with --elastic over one without, in turns."""
    ratios, quiet, times = [], {}, {}
    for turn in range(rounds):
        own = {}
        for kind in (["--elastic"], []) if turn % 2 else ([], ["--elastic"]):
            with job_of(name, [*kind, "--logical-ranks", str(ranks)],
                        ["--steps", model.cost_steps, "--hash-every", 10**9], ranks=ranks) as job:
                if job.launchers[0].wait(10 * PATIENCE) != 0:
                    raise ChildProcessError("training without losses failed")
                found = sorted(value * 1e3 for process in job.read() for value in process.step_times()[ranks])
            own[bool(kind)] = statistics.median(found)
            quiet.setdefault(bool(kind), []).append(found[len(found) // 50])
            times.setdefault(bool(kind), []).append(own[bool(kind)])
        ratios.append(own[True] / own[False])
    yield {"bench": "recover", "peer": "lockstep", "layout": "cost", "model": name, "ranks": ranks, "rounds": len(ratios),
           "plain_ms": statistics.median(times[False]), "elastic_ms": statistics.median(times[True]),
           "percent": 100 * (statistics.median(ratios) - 1),
           "quiet_percent": 100 * (statistics.median(quiet[True]) / statistics.median(quiet[False]) - 1),
           "low_percent": 100 * (min(ratios) - 1), "high_percent": 100 * (max(ratios) - 1)}


def measure_peer(peer, kills):
    done = subprocess.run([PYTHON, str(ROOT / f"bench/peers/recover_{peer}.py"), "--kills", str(kills), "--json"],
                          capture_output=True, text=True, preexec_fn=end_with_parent)
    if done.returncode != 0:
        raise ChildProcessError(f"{peer} failed:\n{done.stderr[-2000:]}")
    for line in done.stdout.splitlines():
        yield {**json.loads(line), "layout": "ranks", "wrong": None}  # torchft's mean is over fewer ranks


# ---- what is printed

def heading(options):
    cpu = next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    run = lambda *command: subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip() or "?"
    version = "import importlib.metadata as m; print(m.version('torch'))"
    torch = run(PYTHON, "-c", version) if os.access(PYTHON, os.X_OK) else "?"
    steady = ", ".join(f"{model} {options.settings[model].steady}" for model in options.models)
    print(f"# CPU: {cpu}, {os.cpu_count()} cores. torch {torch}, commit {run('git', 'rev-parse', '--short', 'HEAD')}. {RANKS} ranks of one"
          f" thread each. The first {WARM_UP} steps of each process warm up; steady steps before each kill: {steady}.")
    print("# beyond: from the kill to the next complete step on the slowest survivor, minus a step of as many ranks; its parts:"
          " noticed, formed. stall: of survivors, when the replacement joins. wrong: hashes of weights.")
    print(f"#{'peer':<9} {'layout':<7}{'model':<6}{'kills':>6}{'beyond':>9}{'p99':>8}{'noticed':>9}{'formed':>8}{'redone':>8}"
          f"{'newcomer':>10}{'load':>7}{'stall':>8}{'x copy':>8}{'x bcast':>8}{'step':>8}{'without':>9}{'wrong':>7}")
    print(f"#{'':<9} {'':<7}{'':<6}{'':>6}{'ms':>9}{'ms':>8}{'ms':>9}{'ms':>8}{'':>8}{'ms':>10}{'ms':>7}{'ms':>8}{'':>8}{'':>8}"
          f"{'ms':>8}{'ms':>9}{'':>7}", flush=True)


def show(row):
    def cell(name, width, digits=0):
        value = row.get(name)
        return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"

    if row["layout"] == "cost":
        print(f" {row['peer']:<9} {row['layout']:<7}{row['model']:<6} without --elastic {row['plain_ms']:.2f} ms, with it "
              f"{row['elastic_ms']:.2f} ms: {row['percent']:+.2f} % (rounds {row['low_percent']:+.1f} to "
              f"{row['high_percent']:+.1f}), quiet {row['quiet_percent']:+.2f} %; {row['rounds']} rounds, {row['ranks']} ranks", flush=True)
        return
    print(f" {row['peer']:<9} {row['layout']:<7}{row['model']:<6}{cell('kills', 6)}{cell('p50_ms', 9)}{cell('p99_ms', 8)}"
          f"{cell('noticed_ms', 9)}{cell('formed_ms', 8)}{cell('steps_lost', 8, 2)}{cell('newcomer_ms', 10)}{cell('load_ms', 7)}"
          f"{cell('stall_newcomer_ms', 8)}{cell('x_copy', 8, 1)}{cell('x_broadcast', 8, 1)}{cell('step_ms', 8, 1)}"
          f"{cell('step_without_ms', 9, 1)}{cell('wrong', 7)}", flush=True)


def judge(row):
    """What was asked for and is not so."""
    if row["peer"] != "lockstep":
        return
    for name, most in ASKED[row["layout"]].items():
        if name in row and row[name] > most:
            yield f"{row['layout']}, {row['model']}: {name} {row[name]:.3g}, asked for at most {most}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words = lambda text: text.split(",")
    parser.add_argument("--kills", type=int, help="of each model on one host; without it 200 of the MLP, 40 of the GPT")
    parser.add_argument("--models", type=words, default=list(MODELS))
    parser.add_argument("--only", type=words, default=["ranks", "hosts", "cost", "peers"])
    parser.add_argument("--peer-kills", type=int, default=PEER_KILLS)
    parser.add_argument("--host-kills", type=int, default=HOST_KILLS)
    parser.add_argument("--cuts", type=int, default=HOST_CUTS)
    parser.add_argument("--rounds", type=int, help="of the cost; without it 15 of the MLP, 7 of the GPT")
    parser.add_argument("--seed", type=int, help="which ranks are killed, and when in a step")
    parser.add_argument("--quick", action="store_true", help="to see that it runs: too short for figures, and no peers")
    parser.add_argument("--json", action="store_true", help="one object a row")
    options = parser.parse_args()
    if options.quick:
        options.host_kills, options.cuts, options.peer_kills = 1, 1, 0
    options.settings = QUICK_MODELS if QUICK or options.quick else MODELS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that jobs and hosts are cleared away
    chance = random.Random(options.seed)
    groups = []
    for name in options.models:
        model = options.settings[name]
        if "ranks" in options.only:
            groups.append((f"ranks, {name}", measure(name, model, options.kills or model.kills, None, chance)))
    if "peers" in options.only and options.peer_kills > 0:
        groups += [(peer, measure_peer(peer, options.peer_kills)) for peer in ("torchft", "torchrun")]
    if "hosts" in options.only:
        if os.geteuid() == 0:
            groups.append(("hosts", measure("mlp", options.settings["mlp"], options.host_kills, options.cuts, chance)))
        else:
            print("# Without hosts: network namespaces need root.", file=sys.stderr)
    if "cost" in options.only:
        for name in options.models:
            model = options.settings[name]
            groups.append((f"cost, {name}", measure_cost(name, model, options.rounds or model.cost_rounds)))
    if not options.json:
        heading(options)
    wrong, failed, missed = 0, 0, []
    for what, rows in groups:
        try:
            for row in rows:
                print(json.dumps(row), flush=True) if options.json else show(row)
                wrong += row.get("wrong") or 0
                missed += judge(row)
        except (TimeoutError, OSError, ChildProcessError, subprocess.SubprocessError) as error:
            print(f"bench: {what}: {error}", file=sys.stderr)
            failed += 1
    if not options.json:
        print("# Asked for and not met: " + ("; ".join(missed) or "nothing") + ".")
        print(f"# Wrong values: {wrong}, failed runs: {failed}. {'FAILED' if wrong or failed else 'OK'}")
    sys.exit(1 if wrong or failed else 0)


main()
