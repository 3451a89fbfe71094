"""PyTorch's collectives through NCCL at the sizes of `bench-nccl`, one process a GPU:

    torchrun --nproc-per-node N benches/peer/nccl_bw.py > FILE

Prints NAME, a tab, milliseconds; the slowest rank's.
"""

import os
import torch
import torch.distributed as dist

SIZES = [1 << power for power in (10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)]


def timed(step, calls):
    for _ in range(5):
        step()
    means = []
    for _ in range(3):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            step()
        end.record()
        torch.cuda.synchronize()
        means.append(start.elapsed_time(end) / calls)
    mean = torch.tensor(sorted(means)[1], device="cuda")
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    return mean.item()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    n = dist.get_world_size()
    for size in SIZES:
        # The whole, a rank's share of it, and another whole.
        x = torch.ones(size // 2, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(x.numel() // n, device="cuda", dtype=torch.bfloat16)
        z = torch.empty_like(x)
        calls = max(20, min(200, (1 << 30) // size))
        steps = {
            "all_reduce": lambda: dist.all_reduce(x),
            "all_gather": lambda: dist.all_gather_into_tensor(x, y),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(y, x),
            "all_to_all": lambda: dist.all_to_all_single(z, x),
        }
        for name, step in steps.items():
            milliseconds = timed(step, calls)
            if dist.get_rank() == 0:
                print(f"{name} {size}\t{milliseconds:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
