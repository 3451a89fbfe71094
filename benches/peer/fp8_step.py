"""FP8 training with torchao + torch.compile, what torchtitan's `--float8` does: the step that megaburn's FP8 has to beat.

    [torchrun --nproc-per-node N] fp8_step.py [--layers 4] [--vocab 32000] [--seq-len 8192] [--steps 8] [--kinds bf16,tensorwise,rowwise]

Needs torchao (0.17.0 for torch 2.11). One GPU: plain model, f32 masters through FSDP2's mixed precision on a mesh of one.
Prints NAME <tab> ms a step <tab> tokens/s/GPU <tab> GiB reserved <tab> loss.
"""
import argparse, gc, os, time, torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

HIDDEN, HEADS, KV, FFN, D = 4096, 32, 8, 14336, 128

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(HIDDEN, 1e-5), nn.RMSNorm(HIDDEN, 1e-5)
        self.qkv, self.o = nn.Linear(HIDDEN, (HEADS + 2 * KV) * D, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)
    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, -1, D).transpose(1, 2) for y in self.qkv(self.n1(x)).split([HEADS * D, KV * D, KV * D], -1))
        def rot(y):
            a, c = y.chunk(2, -1)
            return (y * cos + torch.cat((-c, a), -1) * sin).to(y.dtype)
        y = F.scaled_dot_product_attention(rot(q), rot(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        g, u = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(g) * u)

class Llama(nn.Module):
    def __init__(self, layers, vocab):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(vocab, HIDDEN), nn.RMSNorm(HIDDEN, 1e-5), nn.Linear(HIDDEN, vocab, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
    def forward(self, t, cos, sin):
        x = self.embedding(t)
        for b in self.blocks: x = b(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, self.head.out_features).float(), t.view(-1))

def measure(a, kind, world):
    torch.manual_seed(0)
    with torch.device("meta"): m = Llama(a.layers, a.vocab)
    if kind != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        config = Float8LinearConfig.from_recipe_name(kind) if kind != "tensorwise" else Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(m, config=config, module_filter_fn=lambda mod, fqn: fqn != "head")
    mesh = init_device_mesh("cuda", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i in range(len(m.blocks)):
        m.blocks[i] = torch.compile(m.blocks[i]); fully_shard(m.blocks[i], mesh=mesh, mp_policy=policy, reshard_after_forward=a.zero3)
    fully_shard(m, mesh=mesh, mp_policy=policy)
    m.to_empty(device="cuda")
    for n, p in m.named_parameters(): nn.init.ones_(p) if p.dim() == 1 else nn.init.normal_(p, 0, 0.02)
    f = torch.outer(torch.arange(a.seq_len, device="cuda"), 1.0 / 500000 ** (torch.arange(0, D, 2, device="cuda") / D)).repeat(1, 2)
    cos, sin = f.cos().bfloat16(), f.sin().bfloat16()
    opt = torch.optim.AdamW(m.parameters(), lr=1e-5, fused=True)
    t = torch.randint(0, a.vocab, (1, a.seq_len), device="cuda")
    def step():
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True): loss = m(t, cos, sin)
        loss.backward(); torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0); opt.step(); opt.zero_grad(set_to_none=True)
        if kind == "tensorwise":
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
            precompute_float8_dynamic_scale_for_fsdp(m)
        return loss
    for _ in range(4): step()
    torch.cuda.synchronize(); dist.barrier(); torch.cuda.reset_peak_memory_stats(); s = time.time()
    for _ in range(a.steps): loss = step()
    torch.cuda.synchronize(); dist.barrier(); dt = (time.time() - s) / a.steps
    if dist.get_rank() == 0:
        print(f"torchao {kind}\t{dt * 1e3:.2f} ms\t{a.seq_len / dt:.0f} tok/s/GPU\t{torch.cuda.max_memory_reserved() / 2**30:.1f} GiB\tloss {loss.item():.4f}", flush=True)

def main():
    p = argparse.ArgumentParser()
    p.add_argument("--layers", type=int, default=4); p.add_argument("--vocab", type=int, default=32000); p.add_argument("--seq-len", type=int, default=8192)
    p.add_argument("--steps", type=int, default=8); p.add_argument("--kinds", default="bf16,tensorwise,rowwise"); p.add_argument("--zero3", action="store_true")
    a = p.parse_args()
    for k, v in dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511").items(): os.environ.setdefault(k, v)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"])); dist.init_process_group("nccl")
    for kind in a.kinds.split(","):
        try: measure(a, kind, dist.get_world_size())
        except Exception as e: print(kind, "failed:", type(e).__name__, str(e)[:300], flush=True)
        gc.collect(); torch._dynamo.reset(); torch.cuda.empty_cache()
    dist.destroy_process_group()

main()
