"""Makes kit_golden.json: what Python's samplers, optimizers, schedules, clip_grad_norm_, GradScaler and
BatchNorm do.

    build/venv/bin/python3 tests/golden/make_kit_golden.py > tests/golden/kit_golden.json

Random numbers are drawn by torch with fixed seeds; LibTorch draws the same ones in C++.
"""

import json
import warnings

import torch
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DistributedSampler

warnings.filterwarnings("ignore")


def sampler_cases():
    for size, ranks, shuffle, drop_last, epoch, seed in [
        (10, 3, True, False, 0, 0), (10, 3, True, True, 0, 0), (10, 3, True, False, 5, 7),
        (3, 8, True, False, 1, 0), (100, 4, False, False, 0, 0), (101, 4, False, True, 2, 3),
    ]:
        indices = []
        for rank in range(ranks):
            sampler = DistributedSampler(range(size), ranks, rank, shuffle=shuffle, seed=seed,
                                         drop_last=drop_last)
            sampler.set_epoch(epoch)
            indices.append(list(sampler))
            assert len(sampler) == len(indices[-1])
        yield {"size": size, "ranks": ranks, "shuffle": shuffle, "drop_last": drop_last, "epoch": epoch,
               "seed": seed, "indices": indices}


def optimizer_cases():
    for name, options in [
        ("AdamW", {"lr": 1e-2}), ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
        ("AdamW", {"lr": 1e-2, "amsgrad": True}), ("Adam", {"lr": 1e-2}),
        ("Adam", {"lr": 1e-2, "weight_decay": 0.1}), ("SGD", {"lr": 1e-2}),
        ("SGD", {"lr": 1e-2, "momentum": 0.9}),
        ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
    ]:
        torch.manual_seed(1)
        parameters = [torch.randn(3, 5).requires_grad_(), torch.randn(7).requires_grad_()]
        optimizer = getattr(torch.optim, name)(parameters, fused=True, **options)
        values = []
        for step in range(100):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape)
            optimizer.step()
            values.append(sum(parameter.detach().double().sum().item() for parameter in parameters))
        yield {"name": name, "options": options, "sums": values,
               "last": [parameter.detach().flatten().tolist() for parameter in parameters]}


def schedule_cases():
    def run(make, steps=40, value="lr"):
        optimizer = torch.optim.SGD([torch.zeros(1).requires_grad_()], lr=0.5)
        schedule = make(optimizer)
        values = []
        for _ in range(steps):
            values.append(optimizer.param_groups[0][value])
            optimizer.step()
            schedule.step()
        return values

    cycle = lambda o: schedulers.OneCycleLR(o, max_lr=0.5, total_steps=41)
    return run(cycle, value="momentum"), {
        "linear": run(lambda o: schedulers.LinearLR(o, start_factor=1, end_factor=0.1, total_iters=30)),
        "cosine": run(lambda o: schedulers.CosineAnnealingLR(o, T_max=40, eta_min=0.05)),
        "stairs": run(lambda o: schedulers.StepLR(o, step_size=7, gamma=0.3)),
        "one_cycle": run(cycle),
        "warm_up": run(lambda o: schedulers.SequentialLR(o, [
            schedulers.LinearLR(o, start_factor=0.1, end_factor=1, total_iters=9),
            schedulers.CosineAnnealingLR(o, T_max=30)], milestones=[10])),
    }


def clip_cases():
    for max_norm in (0.5, 3, 1000):
        torch.manual_seed(1)
        parameters = [torch.randn(3, 5).requires_grad_(), torch.randn(7).requires_grad_()]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        yield {"max_norm": max_norm, "norm": norm.item(), "last": parameters[1].grad.tolist()}


def scaler_steps():
    """Two optimizers and one scaler; the gradients of the second overflow in steps 2, 5 and 6."""
    weights = [torch.ones(3).requires_grad_(), torch.ones(3).requires_grad_()]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scaler = torch.amp.GradScaler("cpu", init_scale=8, growth_factor=2, backoff_factor=0.5,
                                  growth_interval=3)
    for step in range(12):
        factor = float("inf") if step in (2, 5, 6) else step + 1
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(weights[0].sum() + (weights[1] * factor).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        yield {"scale": scaler.get_scale(), "weights": [weight[0].item() for weight in weights]}


def batch_norm():
    """On the batches of two ranks, of four and three rows, as one. Python's SyncBatchNorm computes this,
    but on GPUs only."""
    torch.manual_seed(4)
    rows, factors = torch.randn(7, 3).requires_grad_(), torch.randn(7, 3)
    layer = torch.nn.BatchNorm1d(3)
    output = layer(rows)
    (output * factors).sum().backward()
    return {"output": output.tolist(), "gradient": rows.grad.tolist(),
            "weight": layer.weight.grad.tolist(), "bias": layer.bias.grad.tolist(),
            "mean": layer.running_mean.tolist(), "variance": layer.running_var.tolist()}


momentum, schedules = schedule_cases()
print(json.dumps({"torch": torch.__version__.split("+")[0], "samplers": list(sampler_cases()),
                  "optimizers": list(optimizer_cases()), "schedules": schedules,
                  "one_cycle_momentum": momentum, "clip": list(clip_cases()),
                  "scaler": list(scaler_steps()), "batch_norm": batch_norm()}))
