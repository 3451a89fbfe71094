"""PyTorch's distributed checkpoint (DCP) of the state that `benches/checkpoint.py waiting` saves: FSDP2 over all ranks,
f32 parameters computed in bf16, AdamW. Prints how long a synchronous save takes, how long training waits for an
asynchronous one, and when that is complete.

    torchrun --nproc-per-node N checkpoint.py [--layers 4] [--vocab 32000] [--seq-len 4096] [--dir FOLDER] [--saves 3]
"""

import argparse, os, shutil, time, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--dir", default="/tmp/dcp")
    args = parser.parse_args()
    fsdp.VOCAB = args.vocab
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cuda:nccl,cpu:gloo")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("cuda"):
        model = fsdp.Llama(args.layers)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.randint(0, args.vocab, (1, args.seq_len), device="cuda")
    angles = torch.rand(args.seq_len, fsdp.HEAD_DIM, device="cuda")
    cos, sin = angles.cos(), angles.sin()

    def compute():
        loss = model(tokens, cos, sin)
        loss.backward()
        return loss.item()

    def step():
        loss = compute()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def state():
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def folder(name):
        path = os.path.join(args.dir, name)
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        return path

    def clock():
        torch.cuda.synchronize()
        dist.barrier()
        return time.time()

    step(), step()
    sync = []
    for number in range(args.saves):
        path = folder("sync")
        begun = clock()
        dcp.save(state(), checkpoint_id=path)
        sync.append(clock() - begun)
        folder("sync"), step()
    # The default copies to pageable memory while training waits. With "pinned, overlapped" a thread copies, and
    # training waits for it before the next update. A stager of torch 2.11 cannot be used twice (it clears its table of
    # types after a save), so pinned memory is allocated for each save.
    stagers = {"default": lambda: None, "pinned": lambda: DefaultStager(StagingOptions(True, False, False, True)),
               "pinned, overlapped": lambda: DefaultStager(StagingOptions(True, False, True, True))}
    mean = lambda values: sum(values) / len(values)
    is_main = dist.get_rank() == 0
    if is_main:
        print(f"dcp synchronous: training waits {mean(sync):.3f} s ({', '.join(f'{s:.2f}' for s in sync)})", flush=True)
    for name, make in stagers.items():
        waited, complete = [], []
        for number in range(args.saves + 1):
            path = folder("async")
            begun = clock()
            try:
                saving = dcp.async_save(state(), checkpoint_id=path, async_stager=make())
                staged = getattr(saving, "staging_completion", None)
                waited.append(time.time() - begun)
                compute()
                if staged is not None:  # The parameters may not change before they are copied.
                    begun_waiting = time.time()
                    staged.result()
                    waited[-1] += time.time() - begun_waiting
            except Exception as error:
                print(f"dcp asynchronous, {name} staging: {type(error).__name__}: {error}".splitlines()[0], flush=True)
                break
            (getattr(saving, "upload_completion", None) or saving).result()
            complete.append(clock() - begun)
            size = sum(os.path.getsize(os.path.join(path, file)) for file in os.listdir(path))
            folder("async"), step()
        if is_main and len(waited) > 1:
            print(f"dcp asynchronous, {name} staging: training waits {mean(waited[1:]):.3f} s = "
                  f"{100 * mean(waited[1:]) / mean(sync):.1f}% of a synchronous save (first {waited[0]:.2f} s); complete after "
                  f"{mean(complete[1:]):.2f} s; {size / 1e9:.2f} GB in files of this host", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
