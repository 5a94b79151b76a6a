"""The Python peer of examples/gpt.cpp: one rank of torch's DistributedDataParallel on Gloo.

    lockstep run -n 2 -- python3 bench/peers/gpt.py --text FILE --loss-file FILE      (or torchrun)

The model is that of examples/gpt.cpp, layer by layer, from the same weights with the same seed; the
order of samples, accumulation, clipping, optimizer and schedule are the same.
"""

import argparse
import contextlib
import json
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LAYERS, HEADS, WIDTH, CONTEXT = 4, 4, 128, 64
ACCUMULATE = 2


class Text(Dataset):
    def __init__(self, path):
        with open(path, "rb") as file:
            characters = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        self.vocabulary, self.tokens = characters.unique(return_inverse=True)

    def __len__(self):
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index):
        part = self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return part[:-1], part[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential()
        self.norm = nn.LayerNorm(WIDTH)
        for _ in range(LAYERS):
            self.blocks.append(Block())
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, 0, 0.02)
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def batches(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def curve(steps):
    """By how much the learning rate is multiplied: lockstep's warm_up() and cosine()."""
    rising = 1 + steps // 20

    def factor(step):
        if step < rising:
            return (step + 1) / rising
        return 0.1 + 0.9 * (1 + math.cos(math.pi * min(step - rising, steps) / steps)) / 2

    return factor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", required=True)
    parser.add_argument("--loss-file", default=os.devnull)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    text = Text(options.text)
    sampler = DistributedSampler(text, seed=options.seed)
    loader = batches(DataLoader(text, options.batch, sampler=sampler), sampler)

    model = Gpt(len(text.vocabulary))
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, curve(options.steps))
    losses = open(options.loss_file, "a") if rank == 0 else None

    for step in range(1, options.steps + 1):
        loss_sum = torch.zeros(())
        for i in range(ACCUMULATE):
            data, target = next(loader)
            is_last = i + 1 == ACCUMULATE
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
                    scores = ddp(data).flatten(0, 1)
                    loss = F.cross_entropy(scores, target.flatten()) / ACCUMULATE
                loss.backward()
            loss_sum += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean_loss = loss_sum.double()
        dist.all_reduce(mean_loss)
        if rank == 0:
            line = {"step": step, "time": round(time.time(), 3), "loss": mean_loss.item() / size}
            print(json.dumps(line), file=losses, flush=True)
    dist.barrier()
    os._exit(0)  # the interpreter's end now and then aborts in a thread of torch's


main()
