"""Makes tests/fixtures/torch with PyTorch, and checks with it what megaburn-torch writes.

    pip install torch==2.11 numpy safetensors megatron-core==0.16.1
    python tests/tools/torch_formats.py make            (or: make NAME, for one of pickles, pt, dcp, weights)
    MEGABURN_TORCH_CHECK=FOLDER cargo test -p megaburn-torch && python tests/tools/torch_formats.py check FOLDER

The second line reads with PyTorch what the tests of the crate wrote. CI has no PyTorch, so it is run by hand when a
writer changes.
The folder gets pickles of all protocols (pickles/), files of torch.save, good ones with their tensors
in NAME.json and refused ones (pt/), folders of torch.distributed.checkpoint, written by 4 processes,
with their whole tensors in NAME.json (dcp/), and the weights of tests/fixtures/llama-one-group as published
models of PyTorch have them (weights/).
Made with Python 3.11, torch 2.11 and megatron-core 0.16.1.
"""

import collections
import json
import pickle
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

OUT = Path(__file__).parent.parent / "fixtures" / "torch"


class Plain:
    """An object with attributes; `__reduce_ex__` of protocol 2 and up makes it by `__new__`."""


def make_pickles():
    out = OUT / "pickles"
    out.mkdir()
    Plain.__module__ = "somewhere"
    Plain.__qualname__ = "Plain"
    sys.modules["somewhere"] = type(sys)("somewhere")
    sys.modules["somewhere"].Plain = Plain
    shared, cycle, plain = [1, 2], [], Plain()
    cycle.append(cycle)
    plain.width, plain.name = 7, "wide"
    value = {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63)],
        "large": [2**63, 2**64, -(2**63) - 1],
        "floats": [0.5, -0.0, float("inf"), float("-inf"), 1e300],
        "text": "größer\n\\ '\" \u20ac \U0001f600 \x00",
        "long text": "x" * 300,
        "bytes": bytes(range(256)),
        "no bytes": b"",
        "bytearray": bytearray(b"\x00\xff"),
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "set": {5},
        "frozenset": frozenset([6]),
        "shared": [shared, shared],
        "cycle": cycle,
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        3: "key",
        "plain": plain,
        "class": collections.OrderedDict,
        "function": len,
    }
    for protocol in range(6):
        (out / f"protocol{protocol}.pkl").write_bytes(pickle.dumps(value, protocol))


DTYPES = """float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz
float8_e8m0fnu int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex32 complex64 complex128""".split()


def raw(tensor):
    """The bytes of a tensor in row-major order."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def random(*shape, dtype="float32"):
    """A tensor of random bytes."""
    dtype = getattr(torch, dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def describe(path, tensors):
    """Writes what the tensors of a file are to a file next to it."""
    about = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "strides": list(tensor.stride()),
            "offset": tensor.storage_offset(),
            "bytes": raw(tensor).hex(),
        }
        for name, tensor in tensors.items()
    }
    path.with_suffix(".json").write_text(json.dumps(about, indent=0))


def make_pt():
    out = OUT / "pt"
    out.mkdir()
    torch.manual_seed(30)
    base = random(7, 5)
    plain = {
        "layers": [{"weight": base, "bias": torch.nn.Parameter(random(3))}, {"weight": base.t()}],
        "rows": base[2:5],
        "column": base[:, 3],
        "steps": base[::3, 1::2],
        "permuted": random(2, 3, 4).permute(2, 0, 1),
        "expanded": random(3, 1).expand(3, 4),
        "scalar": random(),
        "empty": random(0, 4),
        "epoch": 3,
        "names": ("a", None, 0.5),
        0: {"exp_avg": random(6)},
    }
    flat = {
        "layers.0.weight": base,
        "layers.0.bias": plain["layers"][0]["bias"],
        "layers.1.weight": base.t(),
        "0.exp_avg": plain[0]["exp_avg"],
    }
    flat |= {name: plain[name] for name in "rows column steps permuted expanded scalar empty".split()}
    types = {dtype: random(2, 3, dtype=dtype) for dtype in DTYPES}
    torch.save(plain | {"types": types}, out / "zip.pt")
    describe(out / "zip.pt", flat | {f"types.{name}": tensor for name, tensor in types.items()})
    torch.save(plain, out / "legacy.pt", _use_new_zipfile_serialization=False)
    describe(out / "legacy.pt", flat)
    torch.save(base[1:], out / "one.pt")
    describe(out / "one.pt", {"": base[1:]})

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), out / "optimizer.pt")
    state = optimizer.state_dict()["state"]
    tensors = {f"state.{n}.{k}": tensor for n, of in state.items() for k, tensor in of.items()}
    describe(out / "optimizer.pt", tensors)

    # Refused, each for one reason.
    torch.save({"w": random(2, dtype="complex64").conj()}, out / "conjugate.pt")
    torch.save({"w": torch.eye(3).to_sparse()}, out / "sparse.pt")
    torch.save({"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, out / "quantized.pt")
    torch.save({"w": 0, "whole": model}, out / "module.pt")
    whole = {"w": 0, "whole": torch.nn.Linear(4, 2)}
    torch.save(whole, out / "legacy-module.pt", _use_new_zipfile_serialization=False)
    torch.save(model, out / "model.pt")
    torch.jit.script(model).save(out / "script.pt")
    entries = zipfile.ZipFile(out / "one.pt")
    for name, change in {"big-endian": ("byteorder", b"big"), "storage-cut": ("data/0", b"1234")}.items():
        with zipfile.ZipFile(out / f"{name}.pt", "w") as changed:
            for entry in entries.namelist():
                is_changed = entry.endswith(change[0])
                changed.writestr(entry, change[1] if is_changed else entries.read(entry))
    with zipfile.ZipFile(out / "compressed.pt", "w", zipfile.ZIP_DEFLATED) as changed:
        for entry in entries.namelist():
            changed.writestr(entry, entries.read(entry))
    # The records of archives above 4 GiB.
    zipfile.ZIP64_LIMIT = 1
    with zipfile.ZipFile(out / "zip64.pt", "w") as changed:
        for entry in entries.namelist():
            changed.writestr(entry, entries.read(entry))
    shutil.copy(out / "one.json", out / "zip64.json")


def on_ranks(num_ranks, function, *args):
    """Runs a function on processes that are connected, each with its rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, (num_ranks, folder, function, args), num_ranks)


def on_rank(rank, num_ranks, folder, function, args):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=num_ranks)
    torch.manual_seed(30)
    torch.set_num_threads(1)
    function(rank, *args)
    dist.barrier()
    # Some libraries abort when they are unloaded in another order.
    os._exit(0)


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def save_dcp(rank, name, state, flat):
    """Saves a state dict, and its tensors as whole ones."""
    dcp.save(state, checkpoint_id=OUT / "dcp" / name)
    flat = {name: full(tensor) for name, tensor in flat.items()}
    if rank == 0:
        describe(OUT / "dcp" / f"{name}.json", flat)


def dcp_shards(rank):
    """Tensors of all kinds of sharding, ragged ones too, and objects."""
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    placed = {
        "rows": distribute_tensor(random(7, 5), line, [Shard(0)]),
        "columns": distribute_tensor(random(3, 6, dtype="bfloat16"), line, [Shard(1)]),
        "few": distribute_tensor(random(2, 3), line, [Shard(0)]),
        "grid": distribute_tensor(random(5, 7, dtype="float16"), grid, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(random(9, 2), grid, [Shard(0), Shard(0)]),
        "hybrid": distribute_tensor(random(4, 4), grid, [Replicate(), Shard(1)]),
        "replicated": distribute_tensor(random(3, dtype="int64"), line, [Replicate()]),
        "deep": distribute_tensor(random(2, 5, 3), grid, [Shard(1), Shard(2)]),
    }
    plain = {"plain": random(2, 2), "scalar": random(), "view": random(6, 4)[1:4, ::2].t(), "empty": random(0, 3)}
    state = placed | {"nested": {"plain": plain}, "step": 7, "args": {"lr": 0.5, "names": ["a", "b"]}}
    state["rng"] = {"numbers": list(range(5)), "bytes": b"\x00\xff"}
    save_dcp(rank, "shards", state, placed | {f"nested.plain.{name}": of for name, of in plain.items()})


def dcp_fsdp(rank):
    """A model and its optimizer under FSDP2, in the names of torchtitan."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    state = weights | {"optimizer": states, "train_state": {"step": torch.tensor(10), "ntokens_seen": 4096}}
    flat = weights | {f"optimizer.{name}": of for name, of in states.items() if isinstance(of, torch.Tensor)}
    save_dcp(rank, "fsdp", state, flat | {"train_state.step": torch.tensor(10)})


def make_dcp():
    (OUT / "dcp").mkdir()
    on_ranks(4, dcp_shards)
    on_ranks(4, dcp_fsdp)


class Hostile:
    """Python would run a command when it loads it; the command makes the file that the test looks for."""

    def __reduce__(self):
        return os.system, ("touch megaburn-was-here",)


def make_weights():
    """The same weights in one file, in two with an index, as views of other types, and with a command."""
    from safetensors.torch import load_file

    out = OUT / "weights"
    for name in ["bin", "sharded", "views", "hostile"]:
        (out / name).mkdir(parents=True)
    weights = load_file(OUT.parent / "llama-one-group" / "model.safetensors")
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
    # The model is tied: its state dict has one tensor under two names.
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    state = collections.OrderedDict((name, tensor.detach()) for name, tensor in weights.items())
    state._metadata = collections.OrderedDict([("", {"version": 1})])
    torch.save(state, out / "bin" / "pytorch_model.bin")

    names = list(state)
    files = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for number, (file, names) in enumerate(files.items()):
        of_file = {name: weights[name] for name in names}
        torch.save(of_file, out / "sharded" / file, _use_new_zipfile_serialization=number == 0)
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (out / "sharded" / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=1))

    types = [torch.bfloat16, torch.float16]
    views = {}
    for name, tensor in state.items():
        layer = name.split(".")[2] if ".layers." in name else None
        tensor = tensor.to(torch.float64 if layer is None else types[int(layer)])
        if tensor.dim() == 1:
            # Every second element of a larger storage.
            views[name] = torch.stack([tensor, -tensor], 1)[:, 0]
        elif "q_proj" in name or "down_proj" in name or "embed" in name:
            views[name] = tensor.t().contiguous().t()
        else:
            # Some rows of a larger storage.
            views[name] = torch.cat([-tensor, tensor, -tensor])[len(tensor) : 2 * len(tensor)]
    views["lm_head.weight"] = views["model.embed_tokens.weight"]
    torch.save({"epoch": 3, "model": views}, out / "views" / "consolidated.pt")

    torch.save({"w": torch.ones(2), "trap": Hostile()}, out / "hostile" / "pytorch_model.bin")


MAKERS = {"pickles": make_pickles, "pt": make_pt, "dcp": make_dcp, "weights": make_weights}


def make(*names):
    OUT.mkdir(exist_ok=True)
    for name in names or MAKERS:
        shutil.rmtree(OUT / name, ignore_errors=True)
        MAKERS[name]()


def check_pt(folder):
    """Loads what `pt_write.rs` wrote, and compares it with the bytes in the archive."""
    path = folder / "pt" / "written.pt"
    found = torch.load(path, weights_only=True)
    assert found.pop("epoch") == 3
    assert list(found) == DTYPES, list(found)
    entries = zipfile.ZipFile(path)
    assert entries.testzip() is None
    for number, (name, tensor) in enumerate(found.items()):
        assert tensor.dtype == getattr(torch, name), name
        assert list(tensor.shape) == [[], [5], [3, 2], [0, 7]][number % 4], name
        assert raw(tensor) == entries.read(f"archive/data/{number}"), name
    torch.load(path, weights_only=True, mmap=True)
    print("pt: torch.load reads it")


def compare(path, found):
    """Compares tensors with what a file says."""
    about = json.loads(path.read_text())
    assert sorted(found) == sorted(about), (sorted(found), sorted(about))
    for name, tensor in found.items():
        assert raw(full(tensor)).hex() == about[name]["bytes"], name


def empty_state(path):
    """Tensors to load into."""
    about = json.loads(path.read_text())
    return {name: torch.zeros(of["shape"], dtype=getattr(torch, of["dtype"])) for name, of in about.items()}


def check_dcp_on_rank(rank, folder):
    path = folder / "dcp.json"
    state = empty_state(path)
    line = init_device_mesh("cpu", (3,))
    for name in ["rows", "grid", "deep"]:
        state[name] = distribute_tensor(state[name], line, [Shard(0)])
    dcp.load(state, checkpoint_id=folder / "dcp")
    compare(path, state)


def check_dcp(folder):
    """Loads what `dcp_write.rs` wrote, in one process, on 3 ranks, and as a whole."""
    path = folder / "dcp.json"
    state = empty_state(path) | {"step": 0, "rng.2": None}
    dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
    assert state.pop("step") == 7
    state_of_2 = state.pop("rng.2")
    assert (state_of_2["rank"], state_of_2["numbers"].tolist()) == (2, [2, 2, 2])
    compare(path, state)
    on_ranks(3, check_dcp_on_rank, folder)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / "dcp", folder / "converted.pt")
    state = torch.load(folder / "converted.pt", weights_only=False)
    assert state.pop("step") == 7
    compare(path, {name: of for name, of in state.items() if isinstance(of, torch.Tensor)})
    print("dcp: torch.distributed.checkpoint reads it")


def check(folder):
    check_pt(Path(folder))
    check_dcp(Path(folder))


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](*sys.argv[2:])
