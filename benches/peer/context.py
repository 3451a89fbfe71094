"""PyTorch's context parallelism (`torch.distributed.tensor.experimental.context_parallel`, ring attention, as torchtitan
uses it) with FSDP2 over the same ranks: prints NAME, a tab, milliseconds of a step, its loss read (and GiB that PyTorch
has reserved at most, tokens of a step on each GPU and micro-batches, for `bench-layouts --peer`).

    torchrun --nproc-per-node N context.py [--layers 12] [--seq-len 32768] [--rotate alltoall] [--no-compile]
        [--again] [--loss-rows 8192]

The model is `fsdp.py`'s. Keys and values are repeated for their query heads, which ring attention asks for there
(one rank attends to whole sequences, without). With `--again` blocks are computed again in backward, and with
`--loss-rows` the loss of this number of rows at a time; their logits are not kept."""

import argparse, contextlib, os, time, torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp import HEAD_DIM, HEADS, KV_HEADS, VOCAB


class Block(fsdp.Block):
    def attend(self, q, k, v):
        if dist.get_world_size() == 1:
            return super().attend(q, k, v)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Llama(fsdp.Llama):
    def __init__(self, layers, again, loss_rows):
        super().__init__(0)
        self.blocks, self.again, self.loss_rows = nn.ModuleList(Block() for _ in range(layers)), again, loss_rows

    def forward(self, tokens, labels, cos, sin):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.again else block(x, cos, sin)
        x = self.norm(x)
        if not self.loss_rows:
            return self.sum_of_losses(x, labels) / labels.numel()
        parts = zip(x.split(self.loss_rows, 1), labels.split(self.loss_rows, 1))
        return sum(checkpoint(self.sum_of_losses, *part, use_reentrant=False) for part in parts) / labels.numel()

    def sum_of_losses(self, x, labels):
        return F.cross_entropy(self.head(x).view(-1, VOCAB).float(), labels.reshape(-1), reduction="sum")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seq-len", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rotate", default="alltoall")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--loss-rows", type=int, default=0)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world = dist.get_world_size()
    torch.manual_seed(0)
    set_rotate_method(args.rotate)
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))
    with torch.device("meta"):
        model = Llama(args.layers, args.again, args.loss_rows)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = block if args.no_compile else torch.compile(block)
        fully_shard(model.blocks[i], mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    for p in model.parameters():
        nn.init.normal_(p, 0, 0.02)
    angles = 1.0 / 500000 ** (torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
    angles = torch.outer(torch.arange(args.seq_len, device="cuda"), angles).repeat(1, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step():
        tokens = torch.randint(0, VOCAB, (1, args.seq_len), device="cuda")
        labels, cos, sin = tokens.roll(-1, 1), angles.cos().bfloat16(), angles.sin().bfloat16()
        buffers = [tokens, labels, cos, sin]
        # (PyTorch refuses ring attention with one rank.)
        shared = dict(buffers=buffers, buffer_seq_dims=[1, 1, 0, 0], no_restore_buffers=set(buffers))
        with context_parallel(mesh, **shared) if world > 1 else contextlib.nullcontext():
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
                loss = model(tokens, labels, cos, sin)
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    started = time.time()
    for _ in range(args.steps):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    milliseconds = (time.time() - started) / args.steps * 1e3
    if dist.get_rank() == 0:
        how = f"{args.rotate}{', compiled' if not args.no_compile else ''}{', checkpointed' if args.again else ''}{', loss in parts' if args.loss_rows else ''}"
        name = f"PyTorch FSDP2 cp{world} ({how}), {args.layers} layers, {args.seq_len} tokens"
        gib = torch.cuda.max_memory_reserved() / 2**30
        print(f"{name}\t{milliseconds:.2f}\n{name} GiB\t{gib:.2f}\n{name} tokens\t{args.seq_len / world:.0f}", flush=True)
        print(f"{name} micro-batches\t1", flush=True)
    dist.destroy_process_group()


main()
