"""The errors of PyTorch's fused operations in bf16 against f64, of the shapes of `bench-kernel-errors`:
prints NAME, a tab, the norm of the difference over the norm of the result. The numbers that it draws go into
the folder that is named (NAME INPUT, bf16 in the order of megaburn's shapes), for megaburn to read."""

import pathlib, sys
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


FOLDER = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None


def keep(name, x):
    """Attention here is [batch, heads, tokens, dim], there [tokens, batch, heads, dim]."""
    if FOLDER:
        x = x.permute(2, 0, 1, 3) if name.startswith("attention") else x
        (FOLDER / name).write_bytes(x.contiguous().cpu().view(torch.int16).numpy().tobytes())


def errors(name, fast, plain, **shapes):
    inputs = {key: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
              for key, shape in shapes.items()}
    for key, x in inputs.items():
        keep(f"{name} {key}", x)
    weight, results = None, []
    for function, dtype in ((fast, torch.bfloat16), (plain, torch.float64)):
        leaves = {key: x.detach().to(dtype).requires_grad_() for key, x in inputs.items()}
        y = function(*leaves.values())
        if weight is None:
            weight = torch.randn(y.shape, device="cuda").to(torch.bfloat16)
            keep(f"{name} weight", weight)
        gradients = torch.autograd.grad(y, list(leaves.values()), weight.to(y.dtype))
        results.append([y.detach(), *gradients])
    for what, found, expected in zip(["values", *shapes], *results):
        error = (found.double() - expected).norm() / expected.norm()
        print(f"{name} {what}\t{error.item():.3e}", flush=True)


def attention(causal):
    def fast(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    def plain(q, k, v):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores.softmax(-1) @ v

    return fast, plain


def main():
    torch.seed()
    if FOLDER:
        FOLDER.mkdir(parents=True, exist_ok=True)
    for name, causal, d in (("attention causal 128", True, 128), ("attention whole 64", False, 64)):
        errors(name, *attention(causal), q=(1, 8, 700, d), k=(1, 2, 700, d), v=(1, 2, 700, d))
    both = lambda function: (torch.compile(function), function)
    errors("rms_norm", *both(lambda x, w: F.rms_norm(x, (4096,), w, 1e-5)), x=(700, 4096), w=(4096,))
    errors("layer_norm", *both(lambda x, w, b: F.layer_norm(x, (4096,), w, b, 1e-5)),
           x=(700, 4096), w=(4096,), b=(4096,))
    hidden = torch.ones(700, 700, device="cuda", dtype=torch.bool).triu(1)
    errors("softmax", *both(lambda x: (x * 0.5).masked_fill(hidden, float("-inf")).softmax(-1)),
           x=(1, 4, 700, 700))
    errors("swiglu", *both(lambda x: F.silu(x[:, :4096]) * x[:, 4096:]), x=(700, 8192))
    errors("bias_gelu", *both(lambda x, b: F.gelu(x + b, approximate="tanh")),
           x=(700, 4096), b=(4096,))
    labels = torch.arange(700, device="cuda") * 37 % 8000
    wide = lambda x: x.float() if x.dtype == torch.bfloat16 else x
    errors("cross_entropy", *both(lambda x: F.cross_entropy(wide(x), labels, reduction="none")),
           x=(700, 8000))


main()
