"""A training of a small GPT in the manner of nanoGPT, with the four lines that `Keep` needs. With the setting
``sharded``, FSDP2 divides its model among the ranks, and DCP (torch's library for that) saves checkpoints.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from moments import digest, moment, note, setting
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from elasticrs import Keep

WORDS, LENGTH, SIZE = 32, 12, 32
STEPS, EVERY, PARTS = 24, 8, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(2))
        self.attention = nn.MultiheadAttention(SIZE, 2, dropout=0.1, batch_first=True)
        self.wide = nn.Sequential(
            nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE), nn.Dropout(0.1)
        )

    def forward(self, found):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        normed = self.norms[0](found)
        found = found + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return found + self.wide(self.norms[1](found))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, SIZE), nn.Embedding(LENGTH, SIZE)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text):
        found = self.blocks(self.words(text) + self.places(torch.arange(LENGTH)))
        return self.head(found)


def batch(step):
    moment("loader", step)
    text = torch.randint(WORDS, (4, LENGTH + 1)).cumsum(1) % WORDS
    return text[:, :-1], text[:, 1:]


def loss_of(model, step):
    given, wanted = batch(step)
    return cross_entropy(model(given).flatten(0, 1), wanted.flatten())


@torch.no_grad()
def evaluate(model, step):
    model.eval()
    losses = []
    for _ in range(2):
        losses.append(loss_of(model, step).item().hex())
        moment("evaluate", step)
    note("evaluated", step, losses)
    model.train()


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, is_sharded = dist.get_rank(), setting("sharded")
    torch.manual_seed(1337)
    raw = Gpt()
    if is_sharded:
        for each in (*raw.blocks, raw):
            fully_shard(each)
    model = raw if is_sharded else DistributedDataParallel(raw)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    torch.manual_seed(1337 + rank)

    keep = Keep(model=raw, optimizer=optimizer, every=setting("every", "auto"))
    step = keep.restore(default=0)
    while step < STEPS:
        moment("begin", step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 5)
        if step % EVERY == 0 and (is_sharded or rank == 0):
            evaluate(model, step)
            if is_sharded:
                dcp.save({"model": raw.state_dict()}, checkpoint_id=f"{folder}/out/{step}")
            else:
                torch.save(
                    {"model": raw.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/out.pt"
                )
            moment("saved", step)
        for part in range(PARTS):
            model.require_backward_grad_sync = part == PARTS - 1
            loss = loss_of(model, step)
            note("batch", step, part, loss.item().hex())
            moment("forward", step)
            (loss / PARTS).backward()
        nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        moment("before optimizer", step)
        optimizer.step()
        moment("after optimizer", step)
        optimizer.zero_grad(set_to_none=True)
        step += 1
        keep.step(step)

    own = [getattr(each, "_local_tensor", each) for each in raw.parameters()]
    note("trained", step, digest(own))
    moment("done", step)
    dist.barrier()
    dist.destroy_process_group()


main(setting("folder"))
# Skip the interpreter's shutdown, because threads of gloo sometimes abort the process there (torch 2.15).
sys.stdout.flush()
os._exit(0)
