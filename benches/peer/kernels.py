"""PyTorch's fused operations at the shapes of `bench-kernels`: prints NAME, a tab, milliseconds."""

import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

T, H, FF, V = 8192, 4096, 14336, 128256
DEVICE, BF16 = "cuda", torch.bfloat16


def timed(step, rounds=20):
    for _ in range(5):
        step()
    means = []
    for _ in range(3):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        torch.cuda.synchronize()
        time.sleep(0.05)
        # Some 25 ms in which the host gets ahead: its time does not count.
        torch.cuda._sleep(50_000_000)
        start.record()
        for _ in range(rounds):
            step()
        end.record()
        torch.cuda.synchronize()
        means.append(start.elapsed_time(end) / rounds)
    return sorted(means)[1]


def line(name, milliseconds):
    print(f"{name}\t{milliseconds:.4f}", flush=True)


def both(name, function, inputs, compiled=True):
    function = torch.compile(function) if compiled else function
    with torch.no_grad():
        line(f"{name} fwd", timed(lambda: function(*inputs)))
    out = function(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    grad = tuple(map(torch.randn_like, out)) if isinstance(out, tuple) else torch.randn_like(out)
    line(f"{name} bwd", timed(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)))


def leaf(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=BF16, requires_grad=True)


def memory_bound():
    x, r = leaf(T, H), leaf(T, H)
    w, b = leaf(H), leaf(H)
    line("copy", timed(lambda: r.detach().copy_(x.detach())))
    both("rms_norm", lambda x, w: F.rms_norm(x, (H,), w, 1e-5), (x, w))
    add = lambda x, r, w: (F.rms_norm(x + r, (H,), w, 1e-5), x + r)
    both("rms_norm_add", add, (x, r, w))
    both("layer_norm", lambda x, w, b: F.layer_norm(x, (H,), w, b, 1e-5), (x, w, b))
    both("swiglu", lambda y: F.silu(y[:, :FF]) * y[:, FF:], (leaf(T, 2 * FF),))
    angles = torch.outer(torch.arange(T, device=DEVICE),
                         1 / 500000 ** (torch.arange(0, 128, 2, device=DEVICE) / 128))
    angles = torch.cat((angles, angles), -1)[:, None, None, :]
    cos, sin = angles.cos(), angles.sin()
    rotate = lambda y: (y * cos + torch.cat((-y[..., 64:], y[..., :64]), -1) * sin).to(BF16)
    both("rope", rotate, (leaf(T, 1, 32, 128),))
    mask = torch.ones(4096, 4096, device=DEVICE, dtype=torch.bool).tril()
    softmax = lambda y: torch.softmax((y * 0.088).masked_fill(~mask, -1e4).float(), -1).to(BF16)
    both("softmax", softmax, (leaf(1, 32, 4096, 4096),))
    target = torch.randint(0, V, (T,), device=DEVICE)
    both("cross_entropy", lambda y: F.cross_entropy(y.float(), target), (leaf(T, V),))
    p = torch.randn(500_000_000, device=DEVICE, requires_grad=True)
    p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW([p], fused=True)
    line("adamw", timed(optimizer.step, 5))


def attention():
    for s in (512, 1024, 2048, 4096, 8192):
        b = 8192 // s
        q, (k, v) = leaf(b, 32, s, 128), (leaf(b, 8, s, 128) for _ in range(2))
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION),
                              ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            with sdpa_kernel(backend):
                attend = lambda q, k, v: F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True)
                both(f"attention {s} {name}", attend, (q, k, v), compiled=False)


if __name__ == "__main__":
    attention()
    memory_bound()
