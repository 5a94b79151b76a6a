#!/usr/bin/env python3
"""Makes ddp_golden.json: what Python's DistributedDataParallel on Gloo does, step for step.

Run it with a Python that has torch; tests/multiprocess/golden_test.cpp trains the same with
lockstep. Nothing is random: inputs and first weights are sines, written into the file with the
results. Every number is a float32, printed so that reading it gives the same bits.

The model is 8-16-4 with tanh, the loss is the mean squared error, the optimizer SGD with momentum.
Cases:
  plain        20 steps, another batch on each rank
  accumulate   two backwards under no_sync, a third one that averages, then the step
  unused       a second output layer that only even ranks use, in odd steps
Then single features, each on a model of its own: comm hooks, sparse gradients, buffers.
"""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

RANKS = 2
STEPS = 20
BATCHES = 5  # of each rank; step i takes batch i modulo 5
ROWS = 4
LEARNING_RATE = 0.1
MOMENTUM = 0.9
MICRO_BATCHES = 3


class Net(nn.Module):
    def __init__(self, has_branch):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)
        if has_branch:
            self.branch = nn.Linear(16, 4)

    def forward(self, x, uses_branch=False):
        hidden = torch.tanh(self.first(x))
        output = self.second(hidden)
        return output + self.branch(hidden) if uses_branch else output


def sines(shape, frequency, scale):
    count = math.prod(shape)
    values = [scale * math.sin(frequency * (i + 1)) for i in range(count)]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).reshape(shape)


def make_inputs():
    return {
        "inputs": sines((RANKS, BATCHES, ROWS, 8), 0.37, 1.0),
        "targets": sines((RANKS, BATCHES, ROWS, 4), 0.73, 0.5),
        "first.weight": sines((16, 8), 0.91, 0.3),
        "first.bias": sines((16,), 0.59, 0.1),
        "second.weight": sines((4, 16), 1.37, 0.25),
        "second.bias": sines((4,), 0.43, 0.1),
        "branch.weight": sines((4, 16), 1.73, 0.25),
        "branch.bias": sines((4,), 0.83, 0.1),
    }


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def train(case, rank):
    given = make_inputs()
    has_branch = case == "unused"
    model = Net(has_branch)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(given[name])
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=has_branch)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses, without_gradient, first_gradients = [], [], None

    def backward(batch, uses_branch=False):
        batch %= BATCHES
        loss = F.mse_loss(ddp(given["inputs"][rank, batch], uses_branch), given["targets"][rank, batch])
        loss.backward()
        losses.append(loss.detach())

    for step in range(STEPS):
        optimizer.zero_grad()
        if case == "accumulate":
            for i in range(MICRO_BATCHES - 1):
                with ddp.no_sync():
                    backward(MICRO_BATCHES * step + i)
            backward(MICRO_BATCHES * step + MICRO_BATCHES - 1)
        else:
            backward(step, uses_branch=has_branch and rank % 2 == 0 and step % 2 == 1)
        now = gradients(model)
        without_gradient.append([name for name, gradient in now.items() if gradient is None])
        if step == 0:
            first_gradients = {name: gradient for name, gradient in now.items() if gradient is not None}
        optimizer.step()
    return {
        "losses": torch.stack(losses),
        "without_gradient": without_gradient,  # by step
        "first_gradients": first_gradients,
        "parameters": {name: p.detach() for name, p in model.named_parameters()},
    }


def numbers(shape, seed):
    """As numbers() of tests/multiprocess/ddp_model.h."""
    values = [math.sin(0.37 * (i + 1) + 1.3 * seed) for i in range(math.prod(shape))]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).reshape(shape)


class Product(nn.Module):
    """The gradient of its weight is what it is multiplied with."""

    def __init__(self, *sizes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(sizes))

    def forward(self, factor):
        return (self.weight * factor).sum()


def through_cast(rank, hook):
    ddp = nn.parallel.DistributedDataParallel(Product(3, 6))
    # Within a function, because DDP refuses bf16 without a GPU by the hook's name.
    ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    ddp(numbers((3, 6), rank + 1)).backward()
    return ddp.module.weight.grad


def through_power_sgd(rank):
    """Two plain steps, which Python insists on, then four through factors of two columns. The right
    factor begins with numbers that are not random."""
    ddp = nn.parallel.DistributedDataParallel(Product(8, 6))
    state = power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2,
                                    min_compression_rate=1)
    state.p_memory_dict[0] = torch.empty(8 * 2)
    state.q_memory_dict[0] = numbers((6 * 2,), 9)
    ddp.register_comm_hook(state, power_sgd.powerSGD_hook)
    gradients = []
    for step in range(6):
        ddp.zero_grad()
        ddp(numbers((8, 6), 10 * step + rank + 1) ** 3).backward()  # cubes: a matrix of rank four
        gradients.append(ddp.module.weight.grad.clone())
    return torch.stack(gradients[2:])


def sparse(rank):
    model = nn.EmbeddingBag(9, 2, mode="sum", sparse=True)
    ddp = nn.parallel.DistributedDataParallel(model)
    bags = torch.tensor([[rank, 7, 7], [3 + rank, 2, 8 * rank]])
    (ddp(bags) * numbers((2, 2), rank + 1)).sum().backward()
    gradient = model.weight.grad.coalesce()
    return {"rows": gradient.indices()[0], "values": gradient.values()}


def buffers(rank):
    model = nn.BatchNorm1d(4)
    ddp = nn.parallel.DistributedDataParallel(model)
    for step in range(3):
        ddp(numbers((5, 4), 10 * step + rank + 1)).pow(2).mean().backward()
    return {"mean": model.running_mean, "variance": model.running_var}


def features(rank):
    return {"hooks": {"fp16": through_cast(rank, default_hooks.fp16_compress_hook),
                      "bf16": through_cast(rank, default_hooks.bf16_compress_hook),
                      "power_sgd": through_power_sgd(rank)},
            "sparse": sparse(rank), "buffers": buffers(rank)}


def plain(value):
    """Tensors as nested lists: a float32 is a float64, whose repr reads back to the same bits."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value


def be_rank(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=RANKS)
    cases = {case: plain(train(case, rank)) for case in ("plain", "accumulate", "unused")}
    print(json.dumps({"cases": cases, "features": plain(features(rank))}))
    dist.destroy_process_group()


def cpu_name():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def text(value, depth):
    """JSON with a line for each key of the outer dictionaries."""
    if not isinstance(value, dict) or depth == 0:
        return json.dumps(value)
    indent = "  " * (4 - depth)
    rows = [f"{indent}{json.dumps(key)}: {text(one, depth - 1)}" for key, one in value.items()]
    return "{\n" + ",\n".join(rows) + "\n" + indent[2:] + "}"


def main():
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--store", folder + "/store", "--rank"]
        environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        ranks = [subprocess.Popen(command + [str(rank)], stdout=subprocess.PIPE, env=environment)
                 for rank in range(RANKS)]
        results = [json.loads(rank.communicate()[0]) for rank in ranks]
    cases = {}
    for case, first in results[0]["cases"].items():
        for result in results[1:]:
            for key in ("without_gradient", "first_gradients", "parameters"):
                assert result["cases"][case][key] == first[key], f"{case}: ranks differ in {key}"
        cases[case] = dict(first, losses=[result["cases"][case]["losses"] for result in results])
    first = results[0]["features"]
    for key in ("hooks", "sparse"):  # rank 0's buffers count, the others get them with the next forward
        assert results[1]["features"][key] == first[key], f"ranks differ: {key}"
    golden = {
        "made_with": "torch " + torch.__version__.split("+")[0],
        "made_on": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "learning_rate": LEARNING_RATE,
        "momentum": MOMENTUM,
        "micro_batches": MICRO_BATCHES,
        "given": plain(make_inputs()),
        "cases": cases,
        **first,
    }
    path = pathlib.Path(__file__).with_name("ddp_golden.json")
    path.write_text(text(golden, 3) + "\n")


if "--rank" in sys.argv:
    be_rank(int(sys.argv[4]), sys.argv[2])
else:
    main()
