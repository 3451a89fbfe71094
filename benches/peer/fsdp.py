"""PyTorch's FSDP2 with torch.compile and cuDNN's attention, of the shapes of `bench-data-parallel`:
prints NAME, a tab, milliseconds of a step, its loss read (and GiB that PyTorch has reserved at most).

    torchrun --nproc-per-node N fsdp.py [--layers 12] [--seq-len 8192] [--micro-batches 1] [--zero 3,2]

Parameters and activations are bf16, masters, gradients' sums and AdamW's state f32: sharded as ZeRO-3 does
(`reshard_after_forward`), and as ZeRO-2 does (without it; with several micro-batches whole gradients stay until the
last)."""

import argparse, gc, os, time, torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, HEAD_DIM = 4096, 32, 8, 14336, 128256, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN, 1e-5), nn.RMSNorm(HIDDEN, 1e-5)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.output = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        widths = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
        q, k, v = self.qkv(self.attention_norm(x)).split(widths, -1)
        q, k, v = (y.view(b, t, -1, HEAD_DIM).transpose(1, 2) for y in (q, k, v))

        def rotated(y):
            first, second = y.chunk(2, -1)
            return (y * cos + torch.cat((-second, first), -1) * sin).to(y.dtype)

        o = self.attend(rotated(q), rotated(k), v)
        x = x + self.output(o.transpose(1, 2).reshape(b, t, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(HIDDEN, 1e-5), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens, cos, sin):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCAB).float(), tokens.view(-1))


def measure(args, world, reshard):
    with torch.device("meta"):
        model = Llama(args.layers)
    mesh = init_device_mesh("cuda", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block)
        fully_shard(model.blocks[i], mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # Embedding and head stay, as they do where nothing is said: backward begins with them.
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    for p in model.parameters():
        nn.init.normal_(p, 0, 0.02)
    angles = 1.0 / 500000 ** (torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
    angles = torch.outer(torch.arange(args.seq_len, device="cuda"), angles).repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, VOCAB, (1, args.seq_len), device="cuda")

    def step():
        for i in range(args.micro_batches):
            last = i + 1 == args.micro_batches
            model.set_requires_gradient_sync(last or reshard)
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
                loss = model(tokens, cos, sin) / args.micro_batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    started = time.time()
    for _ in range(args.steps):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    return (time.time() - started) / args.steps * 1e3, torch.cuda.max_memory_reserved() / 2**30


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--zero", default="3,2")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    for stage in args.zero.split(","):
        name, reshard = f"PyTorch FSDP2 (ZeRO-{stage})", stage == "3"
        try:
            milliseconds, gib = measure(args, world, reshard)
        except torch.OutOfMemoryError:
            continue
        finally:
            gc.collect()
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        if rank == 0:
            print(f"{name}\t{milliseconds:.2f}\n{name} GiB\t{gib:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
