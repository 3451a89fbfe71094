"""PyTorch's FP8 products and casts at the shapes of `bench-fp8`: prints NAME, a tab, milliseconds."""

import time

import torch

T = 8192
LAYERS = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def timed(step, rounds, rest, busy):
    for _ in range(3):
        step()
    means = []
    for _ in range(3):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        torch.cuda.synchronize()
        time.sleep(rest)
        if busy:
            # Some 25 ms in which the host gets ahead: its time does not count.
            torch.cuda._sleep(50_000_000)
        start.record()
        for _ in range(rounds):
            step()
        end.record()
        torch.cuda.synchronize()
        means.append(start.elapsed_time(end) / rounds)
    return sorted(means)[1]


def normal(rows, cols):
    return torch.randn(rows, cols, device="cuda").to(torch.bfloat16)


def matrix(rows, cols, dtype):
    """A random matrix in FP8, and the inverse of its scale."""
    x = normal(rows, cols).float()
    scale = torch.finfo(dtype).max / x.abs().max()
    return (x * scale).to(dtype), scale.reciprocal()


def products():
    for i, o in LAYERS:
        for form, (m, n, k), dtype, out in [
            ("fprop", (T, o, i), E4M3, torch.bfloat16),
            ("dgrad", (T, i, o), E5M2, torch.bfloat16),
            ("wgrad f32 +=", (o, i, T), E5M2, torch.float32),
        ]:
            (a, scale_a), (b, scale_b) = matrix(m, k, dtype), matrix(n, k, E4M3)
            for fast in (True, False):
                step = lambda: torch._scaled_mm(
                    a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=out, use_fast_accum=fast)
                name = f"{T}x{i}x{o} {form}{' fast' if fast else ''}"
                print(f"{name}\t{timed(step, 30, 0.1, busy=False):.5f}", flush=True)


def in_blocks(x, square):
    """The matrix in e4m3 with power-of-two scales of 128 neighbours, or of blocks, and their inverses."""
    rows, cols = x.shape
    of = x.float().reshape(rows // 128 if square else rows, 128 if square else 1, cols // 128, 128)
    scale = (448.0 / of.abs().amax((1, 3), keepdim=True)).log2().floor().exp2()
    values = (of * scale).to(E4M3).view(rows, cols)
    return values, scale.reciprocal()[:, 0, :, 0]


def block_products():
    for i, o in LAYERS:
        for form, (m, n, k) in [("fprop", (T, o, i)), ("dgrad", (T, i, o)), ("wgrad f32 +=", (o, i, T))]:
            out = torch.float32 if k == T else torch.bfloat16
            (a, scale_a), (b, scale_b) = in_blocks(normal(m, k), False), in_blocks(normal(n, k), k != T)
            # Scales of neighbours have the order of columns.
            scale_a = scale_a.t().contiguous().t()
            scale_b = (scale_b.t().contiguous() if k == T else scale_b.contiguous().t())
            def step(out=out):
                torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=out)
            try:
                step()
            except Exception as error:
                print(f"# {form} blocks into {out}: {str(error).splitlines()[0][:200]}", flush=True)
                step = lambda step=step: step(torch.bfloat16)
            try:
                milliseconds = timed(step, 30, 0.1, busy=False)
            except Exception as error:
                print(f"# {form} blocks: {str(error).splitlines()[0][:200]}", flush=True)
                continue
            print(f"{T}x{i}x{o} {form} blocks\t{milliseconds:.5f}", flush=True)


def casts():
    def largest(x):
        return x.abs().max().float()

    def to_fp8(x, amax):
        return (x.float() * (448.0 / amax)).clamp(-448.0, 448.0).to(E4M3)

    def transposed(x, amax):
        return to_fp8(x, amax).t().contiguous()

    def both(x, amax):
        y = to_fp8(x, amax)
        return y, y.t().contiguous()

    def of_neighbors(x):
        (y, scales), (z, other) = in_blocks(x, False), in_blocks(x.t(), False)
        return y, scales.t().contiguous(), z, other.t().contiguous()

    def of_blocks(x):
        y, scales = in_blocks(x, True)
        return y, scales, y.t().contiguous(), scales.t().contiguous()

    for width in (4096, 14336):
        x = normal(T, width)
        amax = largest(x)
        for name, function, inputs in [
            ("amax", largest, (x,)),
            ("cast", to_fp8, (x, amax)),
            ("cast, transposed", transposed, (x, amax)),
            ("cast, both", both, (x, amax)),
            ("amax and cast, both", lambda x: both(x, largest(x)), (x,)),
            ("cast of neighbors, both", of_neighbors, (x,)),
            ("cast of blocks, both", of_blocks, (x,)),
        ]:
            compiled = torch.compile(function)
            milliseconds = timed(lambda: compiled(*inputs), 20, 0.05, busy=True)
            print(f"{name} {T}x{width}\t{milliseconds:.5f}", flush=True)


if __name__ == "__main__":
    products()
    block_products()
    casts()
