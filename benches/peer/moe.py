"""Layers of experts in PyTorch, as its own pieces make them: a router in f32, tokens sorted by expert, grouped products
(torch._grouped_mm), a weighted SwiGLU, and sums of what came out; each token's experts in turn, as `bench-moe` has them.

    python3 moe.py [--tokens 4096] [--share-of RANKS] [--no-compile]

Prints NAME PASS, a tab, milliseconds."""
import argparse, math, torch, torch.nn.functional as F
ap = argparse.ArgumentParser(); ap.add_argument("--tokens", type=int, default=4096); ap.add_argument("--share-of", type=int, default=1, help="as bench-moe's"); ap.add_argument("--no-compile", action="store_true"); ap.add_argument("--passes", type=int, default=10)
a = ap.parse_args(); dev = "cuda"
def layer(x, router, up, down, k, sigmoid):
    T, H = x.shape; E = router.shape[1]
    logits = x.float() @ router.float()
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    apart = next(a for a in range(-(-3 * E // 8), E + 2) if math.gcd(a, E) == 1)
    chosen = (torch.arange(T * k, device=x.device) * apart % E).view(T, k)
    w = scores.gather(1, chosen); w = w / w.sum(-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)
    offs = torch.bincount(chosen.flatten(), minlength=E).cumsum(0).to(torch.int32)
    rows = x[order // k]
    g, u = torch._grouped_mm(rows, up, offs=offs).chunk(2, -1)
    h = (F.silu(g.float()) * u.float() * w.flatten()[order, None]).to(x.dtype)
    y = torch._grouped_mm(h, down, offs=offs)
    return torch.zeros_like(x, dtype=torch.float32).index_add_(0, order // k, y.float()).to(x.dtype)
for name, H, FF, E, k, sig in [("mixtral", 4096, 14336, 8, 2, False), ("deepseek", 7168, 2048, 32, 8, True), ("qwen3", 2048, 768, 128, 8, False)]:
    T = a.tokens
    if a.share_of > 1: E, k, T = E // a.share_of, 1, T * k
    p = lambda *s: (torch.randn(*s, device=dev) * 0.02).bfloat16().requires_grad_()
    router, up, down = p(H, E), p(E, H, 2 * FF), p(E, FF, H)
    x = torch.randn(T, H, device=dev).bfloat16().requires_grad_(); dy = torch.randn_like(x)
    f = layer if a.no_compile else torch.compile(layer)
    ev = lambda: torch.cuda.Event(enable_timing=True)
    fw = bw = 0.0
    for i in range(a.passes + 5):
        s, m, e = ev(), ev(), ev()
        s.record(); y = f(x, router, up, down, k, sig); m.record(); y.backward(dy); e.record(); torch.cuda.synchronize()
        if i >= 5: fw += s.elapsed_time(m) / a.passes; bw += m.elapsed_time(e) / a.passes
        for t in (x, router, up, down): t.grad = None
    print(f"{name} forward\t{fw:.4f}\n{name} backward\t{bw:.4f}", flush=True)
    del router, up, down, x, dy; torch.cuda.empty_cache()
