"""Makes training_golden.json: what Python's weight averages, optimizers on f32 copies of bf16
parameters, post-local SGD and join() compute.

    build/venv/bin/python3 tests/golden/make_training_golden.py

Nothing is random: inputs and first weights are sines, which the test computes, too. Every number is
a float32, printed so that reading it gives the same bits.
"""

import collections
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
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as hierarchical
from torch.optim import swa_utils



def sines(shape, seed):
    count = math.prod(shape)
    values = [math.sin(0.37 * (i + 1) + 1.3 * seed) for i in range(count)]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).reshape(shape)


def averages():
    """A model whose weights are sines of the step."""
    cases = {}
    for name, function in (("exponential", swa_utils.get_ema_multi_avg_fn(0.9)),
                           ("equal", swa_utils.get_swa_multi_avg_fn())):
        model = nn.Linear(5, 3)
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=function)
        for step in range(8):
            with torch.no_grad():
                model.weight.copy_(sines((3, 5), step))
                model.bias.copy_(sines((3,), 50 + step))
            averaged.update_parameters(model)
        cases[name] = {"weight": averaged.module.weight.tolist(), "bias": averaged.module.bias.tolist()}
    return cases


def batch_norm():
    """update_bn over four batches, of which the test gives two to each rank."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        model[0].weight.copy_(sines((4, 5), 1))
        model[0].bias.copy_(sines((4,), 2))
    swa_utils.update_bn([sines((6, 5), 10 + i) for i in range(4)], model)
    return {"mean": model[1].running_mean.tolist(), "variance": model[1].running_var.tolist()}


def master_weights():
    cases = []
    for name, options in (("AdamW", {"lr": 1e-3}), ("Adam", {"lr": 1e-3, "amsgrad": True}),
                          ("SGD", {"lr": 1e-3}), ("SGD", {"lr": 1e-3, "momentum": 0.9})):
        parameter = sines((4, 6), 3).to(torch.bfloat16)
        master = parameter.float()
        optimizer = getattr(torch.optim, name)([master], fused=True, **options)
        for step in range(50):
            master.grad = sines((4, 6), 20 + step).to(torch.bfloat16).float()
            optimizer.step()
            parameter.copy_(master)
        cases.append({"name": name, "options": options, "master": master.tolist(),
                      "parameter": parameter.float().tolist()})
    return cases


def post_local_sgd(rank, averager, subgroup=None):
    """Averaged for 3 steps, then within a sub-group, or apart; the weights after each step."""
    model = nn.Linear(6, 3)
    with torch.no_grad():
        model.weight.copy_(0.3 * sines((3, 6), 1))
        model.bias.copy_(0.3 * sines((3,), 2))
    ddp = nn.parallel.DistributedDataParallel(model)
    state = post_local.PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=3,
                                         post_local_gradient_allreduce=subgroup is not None)
    ddp.register_comm_hook(state, post_local.post_localSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights = []
    for step in range(9):
        optimizer.zero_grad()
        ddp(sines((5, 6), 10 * step + rank + 1)).pow(2).mean().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        weights.append(model.weight.detach().tolist())
    return weights


def uneven(rank, divide):
    """Rank r has 2 + 2 r batches; the model at the end."""
    model = nn.Linear(6, 3)
    with torch.no_grad():
        model.weight.copy_(0.3 * sines((3, 6), 1))
        model.bias.copy_(0.3 * sines((3,), 2))
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=divide):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            ddp(sines((5, 6), 10 * step + rank + 1)).pow(2).mean().backward()
            optimizer.step()
    return model.weight.detach().tolist()


def periodic():
    return averagers.PeriodicModelAverager(period=2, warmup_steps=3)


def be_rank(rank, size, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
    if size == 2:
        result = {"post_local_sgd": post_local_sgd(rank, periodic()),
                  "uneven": {str(divide).lower(): uneven(rank, divide) for divide in (True, False)}}
    else:
        subgroup, _ = dist.new_subgroups(group_size=2)
        levels = collections.OrderedDict([(2, 2), (4, 4)])
        averager = hierarchical.HierarchicalModelAverager(levels, warmup_steps=3)
        result = {"parts": post_local_sgd(rank, periodic(), subgroup),
                  "levels": post_local_sgd(rank, averager)}
    print(json.dumps(result))
    dist.destroy_process_group()


def run_ranks(size):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--store", folder + "/store", "--size", str(size), "--rank"]
        environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        ranks = [subprocess.Popen(command + [str(rank)], stdout=subprocess.PIPE, env=environment)
                 for rank in range(size)]
        return [json.loads(rank.communicate()[0]) for rank in ranks]


def main():
    torch.set_num_threads(1)
    results = run_ranks(2)
    of_four = run_ranks(4)
    assert results[0]["uneven"] == results[1]["uneven"], "ranks differ after join()"
    golden = {"made_with": "torch " + torch.__version__.split("+")[0], "averages": averages(),
              "batch_norm": batch_norm(), "master_weights": master_weights(), 
              "post_local_sgd": [result["post_local_sgd"] for result in results],
              "local_sgd_of_four": {case: [result[case] for result in of_four]
                                    for case in ("parts", "levels")},
              "uneven": results[0]["uneven"]}
    path = pathlib.Path(__file__).with_name("training_golden.json")
    rows = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if "--rank" in sys.argv:
    be_rank(int(sys.argv[6]), int(sys.argv[4]), sys.argv[2])
else:
    main()
