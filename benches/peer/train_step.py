"""PyTorch's training step at the shape of `bench-train-step`: prints NAME, a tab, milliseconds, and NAME GiB, a
tab, the peak of its memory.

The shapes are those of Llama-3-8B (hidden 4096, 32 heads, 8 kv heads, ffn 14336), 4 layers, vocab 32000, seq 4096.
"""
import torch, torch.nn as nn, torch.nn.functional as F
dev = "cuda"; bf = torch.bfloat16

def timed(f, n=10):
    for _ in range(3): f()
    torch.cuda.synchronize()
    a, b = torch.cuda.Event(True), torch.cuda.Event(True)
    a.record()
    for _ in range(n): f()
    b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b) / n / 1e3

class Rms(nn.Module):
    def __init__(s, n): super().__init__(); s.w = nn.Parameter(torch.ones(n))
    def forward(s, x): return F.rms_norm(x, (x.shape[-1],), s.w, 1e-5)
class Block(nn.Module):
    def __init__(s, hid, h, kv, ffn):
        super().__init__(); d = hid // h; s.h, s.kv, s.d = h, kv, d
        s.n1, s.n2 = Rms(hid), Rms(hid)
        s.wqkv = nn.Linear(hid, (h + 2 * kv) * d, bias=False); s.wo = nn.Linear(hid, hid, bias=False)
        s.w13 = nn.Linear(hid, 2 * ffn, bias=False); s.w2 = nn.Linear(ffn, hid, bias=False)
    def forward(s, x, cos, sin):
        b, t, _ = x.shape
        q, k, v = s.wqkv(s.n1(x)).split([s.h * s.d, s.kv * s.d, s.kv * s.d], -1)
        q, k, v = q.view(b, t, s.h, s.d).transpose(1, 2), k.view(b, t, s.kv, s.d).transpose(1, 2), v.view(b, t, s.kv, s.d).transpose(1, 2)
        rot = lambda y: y * cos + torch.cat((-y[..., s.d // 2:], y[..., :s.d // 2]), -1) * sin
        o = F.scaled_dot_product_attention(rot(q), rot(k), v, is_causal=True, enable_gqa=True)
        x = x + s.wo(o.transpose(1, 2).reshape(b, t, -1))
        g, u = s.w13(s.n2(x)).chunk(2, -1)
        return x + s.w2(F.silu(g) * u)
class Llama(nn.Module):
    def __init__(s, l, hid, h, kv, ffn, v, seq):
        super().__init__(); s.emb = nn.Embedding(v, hid); s.bl = nn.ModuleList(Block(hid, h, kv, ffn) for _ in range(l)); s.n = Rms(hid); s.head = nn.Linear(hid, v, bias=False)
        d = hid // h; f = 1.0 / 500000 ** (torch.arange(0, d, 2) / d); a = torch.outer(torch.arange(seq), f); a = torch.cat((a, a), -1)
        s.register_buffer("cos", a.cos()); s.register_buffer("sin", a.sin())
    def forward(s, t):
        x = s.emb(t)
        for b in s.bl: x = b(x, s.cos, s.sin)
        return F.cross_entropy(s.head(s.n(x)).view(-1, s.head.out_features).float(), t.view(-1))

class Bf16AdamW:
    """AdamW in the parameters' own bf16, moments too: the fastest that PyTorch has."""
    def __init__(s, m): s.opt = torch.optim.AdamW(m.parameters(), lr=1e-5, fused=True)
    def step(s): s.opt.step(); s.opt.zero_grad(set_to_none=True)
class MasterAdamW:
    """AdamW on f32 masters, gradients and moments, of the clipped gradient, as Megatron-LM's."""
    def __init__(s, m):
        s.params = list(m.parameters())
        s.masters = [p.detach().float().requires_grad_() for p in s.params]
        for x in s.masters: x.grad = torch.empty_like(x)
        s.opt = torch.optim.AdamW(s.masters, lr=1e-5, fused=True)
    def step(s):
        torch._foreach_copy_([x.grad for x in s.masters], [p.grad for p in s.params])
        nn.utils.clip_grad_norm_(s.masters, 1.0, foreach=True)
        s.opt.step()
        with torch.no_grad(): torch._foreach_copy_(s.params, s.masters)
        for p in s.params: p.grad = None

def train(l=4, mbs=1, seq=4096, compiled=False, optimizer=Bf16AdamW):
    hid, h, kv, ffn, v = 4096, 32, 8, 14336, 32000
    torch.manual_seed(0); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
    m = Llama(l, hid, h, kv, ffn, v, seq).to(dev, bf)
    opt = optimizer(m)
    f = torch.compile(m) if compiled else m
    t = torch.randint(0, v, (mbs, seq), device=dev)
    def step():
        loss = f(t); loss.backward(); opt.step(); return loss
    dt = timed(step, 10)
    name = "torch.compile" if compiled else "PyTorch eager"
    if optimizer is MasterAdamW: name += ", f32 masters"
    print(f"{name}\t{dt * 1e3:.3f}", flush=True)
    print(f"{name} GiB\t{torch.cuda.max_memory_allocated() / 2**30:.2f}", flush=True)


if __name__ == "__main__":
    for optimizer in (Bf16AdamW, MasterAdamW):
        for compiled in (False, True): train(compiled=compiled, optimizer=optimizer)
