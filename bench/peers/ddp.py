"""The Python peer of bench/ddp.cpp and bench/memory.cpp: one rank of torch's DistributedDataParallel on Gloo.

The models are those of bench/models.h, layer by layer; the batch and the optimizer are the same. With --zero, its state is
in slices over ranks (ZeroRedundancyOptimizer); with --bare, there are no gradients, no state and no DDP.
Prints one line of JSON with what bench/training_run.h calls a Measurement.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(784, 100)
        self.second = nn.Linear(100, 60)
        self.last = nn.Linear(60, 10)

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class Block(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape

        def split(part):
            return part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)

        q, k, v = self.qkv(self.norm1(x)).split(width, 2)
        mixed = F.scaled_dot_product_attention(split(q), split(k), split(v), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, heads, width, vocabulary, positions, is_tied):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = None if is_tied else nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        weight = self.tokens.weight if self.head is None else self.head.weight
        return F.linear(self.norm(x), weight).flatten(0, 1)


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.randn(10)) for _ in range(1000))

    def forward(self, x):
        return x @ torch.stack(list(self.rows))


def make_workload(name, rank):
    torch.manual_seed(1)
    model = {
        "mlp": Mlp,
        "cnn": Cnn,
        "gpt": lambda: Gpt(6, 6, 384, 65, 256, False),
        "gpt2": lambda: Gpt(12, 12, 768, 50257, 1024, True),
        "gpt2_medium": lambda: Gpt(24, 16, 1024, 50257, 1024, True),
        "many": Many,
    }[name]()
    torch.manual_seed(100 + rank)
    if name == "many":
        return model, torch.randn(4, 1000), torch.randint(10, (4,))
    if name in ("mlp", "cnn"):
        shape = (64, 784) if name == "mlp" else (64, 1, 28, 28)
        return model, torch.randn(shape), torch.randint(10, (64,))
    vocabulary, shape = {"gpt": (65, (4, 128)), "gpt2": (50257, (1, 64)), "gpt2_medium": (50257, (1, 32))}[name]
    return model, torch.randint(vocabulary, shape), torch.randint(vocabulary, (shape[0] * shape[1],))


def bind_to_core(rank, size):
    """As bind_to_core() of bench/ranks.cpp: this thread only, Gloo's stay free."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= size:
        os.sched_setaffinity(0, {cores[rank]})


def peak_mb():  # Gloo shares no memory: all of it is this process's own
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))


def sent_mb():  # of the host, where it has a network of its own
    try:
        with open("/sys/class/net/cable/statistics/tx_bytes") as count:
            return int(count.read()) / 1e6
    except FileNotFoundError:
        return 0


def tell_watch():
    """As tell_watch() of bench/memory_watch.h: watched steps begin."""
    if path := os.environ.get("LOCKSTEP_BENCH_WATCH"):
        with open(path, "ab") as file:
            file.write(b".")


def leave_watch():
    """As leave_watch() there: they have ended."""
    tell_watch()
    path = os.environ.get("LOCKSTEP_BENCH_WATCH")
    until = time.monotonic() + 300
    while path and os.stat(path).st_size <= 2 * int(os.environ["WORLD_SIZE"]) and time.monotonic() < until:
        time.sleep(0.05)


def drop_gradient(parameter):
    parameter.grad = None


def make_optimizer(parameters, is_zero):
    if is_zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # here: it takes memory

        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-4,
                                       fused=True)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def count_wrong(parameters):
    wrong = 0
    for parameter in parameters:
        rank0s = parameter.detach().clone()
        dist.broadcast(rank0s, 0)
        wrong += (parameter.detach().view(torch.int) != rank0s.view(torch.int)).sum().item()
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--store", help="a file in which the ranks meet, instead of MASTER_ADDR")
    parser.add_argument("--watched-steps", type=int, default=0)
    parser.add_argument("--bucket-view", action="store_true")
    parser.add_argument("--zero", action="store_true")
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    method = "file://" + options.store if options.store else "env://"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    model, data, target = make_workload(options.model, rank)
    parameters = list(model.parameters())
    if options.bare:
        ddp = model
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(drop_gradient)
    else:
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=options.bucket_view)
    optimizer = make_optimizer(parameters, options.zero)
    bind_to_core(rank, size)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(ddp(data), target).backward()
        optimizer.step()
        if options.bare:
            dist.barrier()

    for _ in range(options.warm_up):
        step()
    times = []
    sent_before = sent_mb()
    last = time.perf_counter()
    for _ in range(options.steps):
        step()
        now = time.perf_counter()
        times.append((now - last) * 1e3)
        last = now
    wire_mb = (sent_mb() - sent_before) / options.steps
    tell_watch()
    for _ in range(options.watched_steps):
        step()
    leave_watch()
    result = {
        "ms_per_step": statistics.median(times),
        "quiet_ms": sorted(times)[len(times) // 50],
        "mean_ms": statistics.fmean(times),
        "wire_mb": wire_mb,
        "peak_mb": peak_mb(),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "wrong": 0 if options.bare else count_wrong(parameters),
    }
    print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # the interpreter's end now and then aborts in a thread of torch's; it is not measured


if __name__ == "__main__":  # peers/recover.py takes the models from here
    main()
