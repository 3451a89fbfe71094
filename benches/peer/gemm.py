"""PyTorch's matrix products at the shapes of `bench-gemm`: prints NAME, a tab, milliseconds.

Numbers are drawn in f32 and then rounded, as those of `bench-gemm`. `torch.rand` in bf16 gives multiples
of 1/256, whose last mantissa bits are mostly 0: the GPU multiplies them with less power, and keeps a
higher clock.
"""

import time

import torch

SHAPES = [
    (8192, 8192, 8192), (4096, 4096, 4096), (4096, 4096, 6144), (4096, 4096, 28672),
    (4096, 14336, 4096), (4096, 4096, 32000), (8192, 4096, 28672), (8192, 14336, 4096),
]


def timed(step):
    for _ in range(3):
        step()
    means = []
    for _ in range(3):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        torch.cuda.synchronize()
        time.sleep(0.1)
        start.record()
        for _ in range(30):
            step()
        end.record()
        torch.cuda.synchronize()
        means.append(start.elapsed_time(end) / 30)
    return sorted(means)[1]


def main():
    for t, i, o in SHAPES:
        x, w, dy = (
            (torch.rand(r, c, device="cuda") * 2 - 1).to(torch.bfloat16)
            for r, c in [(t, i), (i, o), (t, o)]
        )
        total = torch.zeros(i, o, device="cuda", dtype=torch.float32)
        forms = {
            "fprop": lambda: x @ w,
            "dgrad": lambda: dy @ w.t(),
            "wgrad bf16": lambda: x.t() @ dy,
            "wgrad f32": lambda: torch.mm(x.t(), dy, out_dtype=torch.float32),
            "wgrad f32 +=": lambda: torch.addmm(total, x.t(), dy, out_dtype=torch.float32),
        }
        for name, step in forms.items():
            try:
                print(f"{t}x{i}x{o} {name}\t{timed(step):.5f}", flush=True)
            except Exception as error:  # an older PyTorch has no out_dtype
                print(f"# {t}x{i}x{o} {name}: {error}", flush=True)


if __name__ == "__main__":
    main()
