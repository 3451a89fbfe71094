"""Layers of experts that all ranks share (expert parallelism over N ranks), each rank with tokens of its own, as
Megatron-Core and PyTorch's own pieces compute them; each token's experts in turn, as `bench-moe` has them.

    pip install megatron-core==0.16.1
    torchrun --nproc-per-node N moe_parallel.py [--tokens 4096] [--passes 10] [--only mixtral] [--no-megatron]
        [--no-torch] [--no-compile]
    torchrun --nproc-per-node N moe_parallel.py --tiny

Prints NAME PASS PEER, a tab, milliseconds of the device (the slowest rank's, the median of the passes), of a forward
and of a backward, then NAME PASS with those of the peer that is fastest in both together, for `bench-moe --peer`. What
fails is reported on stderr, and the next peer measured. With `--tiny` nothing is timed: it checks itself without GPUs, in
f32, each peer's outputs and gradients against those of one rank that has all experts.

Megatron-Core is the pip wheel without Transformer Engine or Apex: its `MoELayer` with a router in f32, experts that
its router replay chooses, and as experts `GroupedMLP`, whose library `grouped_gemm` is here `torch._grouped_mm`, or
`SequentialMLP`. PyTorch's pieces are put together as torchtitan does: a router in f32, rows sorted by expert, an
all-to-all of counts, which the host reads, all-to-alls of rows and of their weights, rows sorted by expert again,
grouped products, a weighted SwiGLU, and back; rows are summed by `index_add` in f32 (backward by what autograd makes
of indexing), or, "by inverse", looked up and summed, without atomics. Parameters are bf16, and so are their gradients,
which are added to nothing: they are None before each pass."""

import argparse, contextlib, gc, math, os, sys, traceback, types, unittest.mock
from datetime import timedelta
from functools import cache, partial

import torch, torch.distributed as dist, torch.nn.functional as F
from torch.distributed.nn.functional import all_to_all_single

# Hidden width, experts' width, experts, experts of a token, sigmoid (or softmax), factor of the weights.
SHAPES = {
    "mixtral": (4096, 14336, 8, 2, False, 1.0),
    "deepseek": (7168, 2048, 32, 8, True, 2.5),
    "qwen3": (2048, 768, 128, 8, False, 1.0),
}
TINY = {"softmax": (32, 48, 8, 2, False, 1.0), "sigmoid": (16, 8, 24, 5, True, 2.5)}
WARM_UPS = 5

parser = argparse.ArgumentParser()
parser.add_argument("--tokens", type=int, default=4096)
parser.add_argument("--passes", type=int, default=10)
parser.add_argument("--only", action="append", choices=SHAPES)
for flag in ("--no-megatron", "--no-torch", "--no-compile", "--tiny"):
    parser.add_argument(flag, action="store_true")
args = parser.parse_args()
device, dtype, tokens = ("cpu", torch.float32, 22) if args.tiny else ("cuda", torch.bfloat16, args.tokens)
compiled = (lambda f: f) if args.no_compile or args.tiny else partial(torch.compile, dynamic=False)
if not args.tiny:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo" if args.tiny else "nccl", timeout=timedelta(minutes=4))
rank, world = dist.get_rank(), dist.get_world_size()


def in_turn(experts, top_k):
    """One and the next are three eighths of all experts apart: a token's are of several ranks."""
    apart = next(a for a in range(-(-3 * experts // 8), experts + 2) if math.gcd(a, experts) == 1)
    return (torch.arange(tokens * top_k, device=device) * apart % experts).view(tokens, top_k)


@cache
def start_megatron():
    gmm = lambda rows, weights, counts, trans_b=False: torch._grouped_mm(
        rows, weights, offs=counts.cumsum(0).to(rows.device, torch.int32, non_blocking=True)
    )
    sys.modules["grouped_gemm"] = types.SimpleNamespace(ops=types.SimpleNamespace(gmm=gmm))
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16.1 reads it without Transformer Engine too
    if args.tiny:  # what the layer asks of CUDA
        stream = unittest.mock.Mock()
        torch.cuda.current_device = lambda: device
        torch.cuda.Stream = torch.cuda.current_stream = lambda: stream
        torch.cuda.stream = lambda stream: contextlib.nullcontext()
        on_host = lambda x, as_numpy=False, record_stream=False: x.numpy() if as_numpy and x is not None else x
        token_dispatcher.maybe_move_tensor_to_cpu = on_host
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world)


def megatron(dispatcher, grouped, shape, router, up, down):
    """Megatron-Core's layer of these weights, of experts the rank's own, and its parameters."""
    start_megatron()
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.router_replay import RouterReplayAction
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    hidden, ffn, experts, top_k, sigmoid, factor = shape
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=8, ffn_hidden_size=ffn, moe_ffn_hidden_size=ffn,
        num_moe_experts=experts, moe_router_topk=top_k, moe_router_score_function="sigmoid" if sigmoid else "softmax",
        moe_router_topk_scaling_factor=factor, moe_router_load_balancing_type="none", moe_router_dtype="fp32",
        moe_enable_routing_replay=True, moe_grouped_gemm=grouped, moe_token_dispatcher_type=dispatcher,
        moe_permute_fusion=False, gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        bias_activation_fusion=True, gradient_accumulation_fusion=False, perform_initialization=False,
        expert_model_parallel_size=world, bf16=True, params_dtype=dtype,
    )
    layer = build_module(get_moe_module_spec(False, experts, grouped), config=config).to(device)
    with torch.no_grad():
        layer.router.weight.copy_(router)
        if grouped:
            layer.experts.weight1.view_as(up).copy_(up)
            layer.experts.weight2.view_as(down).copy_(down)
        else:
            for expert, up, down in zip(layer.experts.local_experts, up, down):
                expert.linear_fc1.weight.copy_(up.t())
                expert.linear_fc2.weight.copy_(down.t())
    layer.router.router_replay.set_target_indices(in_turn(experts, top_k))
    layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return lambda x: layer(x)[0], list(layer.parameters())


def looked_up(x, rows):
    return x[rows] if rows.dim() == 1 else x[rows].sum(1, dtype=torch.float32).to(x.dtype)


class LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, back):
        ctx.save_for_backward(back)
        return looked_up(x, rows)

    @staticmethod
    def backward(ctx, dy):
        return looked_up(dy, *ctx.saved_tensors), None, None


def moved(x, rows, back, by_inverse):
    """Those rows of x, or sums of them where `rows` has several for each; `back` is the way back."""
    if by_inverse:
        return LookUp.apply(x, rows, back)
    if rows.dim() == 1:
        return x[rows]
    return torch.zeros(len(rows), x.shape[1], device=x.device).index_add_(0, back, x.float()).to(x.dtype)


def inverse(order):
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


@compiled
def route(x, router, top_k, sigmoid, factor, by_inverse):
    """Rows by expert, their weights, how many there are of each expert, rows' tokens, and tokens' rows."""
    logits = x.float() @ router.float().t()
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    chosen = in_turn(len(router), top_k)
    weights = scores.gather(1, chosen)
    weights = (weights / weights.sum(-1, keepdim=True) * factor).flatten()
    counts = torch.histc(chosen.flatten().float(), len(router), 0, len(router)).long()
    order = chosen.flatten().argsort(stable=True)
    of_rows, of_tokens = order // top_k, inverse(order).view(-1, top_k)
    return moved(x, of_rows, of_tokens, by_inverse), weights[order], counts, of_rows, of_tokens


@compiled
def computed(rows, weights, counts, up, down, by_inverse):
    """What experts make of rows that lie by rank and then by expert, as many as `counts` has."""
    expert = torch.arange(counts.shape[1], device=rows.device).repeat(len(counts))
    order = expert.repeat_interleave(counts.flatten(), output_size=len(rows)).argsort(stable=True)
    back, offs = inverse(order), counts.sum(0).cumsum(0).to(torch.int32)
    gate, rows = torch._grouped_mm(moved(rows, order, back, by_inverse), up, offs=offs).chunk(2, -1)
    rows = (F.silu(gate.float()) * rows.float() * weights[order, None]).to(rows.dtype)
    return moved(torch._grouped_mm(rows, down, offs=offs), back, order, by_inverse)


combined = compiled(moved)


def pytorch(by_inverse, shape, *weights):
    """The layer of PyTorch's pieces of these weights, of experts the rank's own, and its parameters."""
    router, up, down = params = [w.detach().requires_grad_() for w in weights]
    exchange = lambda x, got, sent: all_to_all_single(x.new_empty(sum(got), *x.shape[1:]), x, got, sent)

    def forward(x):
        rows, weights, counts, of_rows, of_tokens = route(x.flatten(0, 1), router, *shape[3:], by_inverse)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, got = torch.stack((counts, arriving)).view(2, world, -1).sum(2).tolist()
        rows, weights = exchange(rows, got, sent), exchange(weights, got, sent)
        rows = computed(rows, weights, arriving.view(-1, len(up)), up, down, by_inverse)
        return combined(exchange(rows, sent, got), of_tokens, of_rows, by_inverse).view_as(x)

    return forward, params


def measured(build, shape, weights):
    """Milliseconds of a forward and of a backward."""
    forward, params = build(shape, *weights)
    x = torch.randn(tokens, 1, shape[0], device=device).to(dtype).requires_grad_()
    dy, times = torch.randn_like(x), []
    for _ in range(args.passes + WARM_UPS):
        for tensor in (x, *params):
            tensor.grad = None
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        dist.barrier()
        start.record()
        y = forward(x)
        middle.record()
        y.backward(dy)
        end.record()
        torch.cuda.synchronize()
        times.append([start.elapsed_time(middle), middle.elapsed_time(end)])
    slowest = torch.tensor(times[WARM_UPS:], dtype=torch.float64).quantile(0.5, dim=0).to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def compared(build, shape, weights):
    """Relative errors of outputs, of the input's gradients and of the sum of weights times their gradients."""
    hidden, ffn, experts, top_k, sigmoid, factor = shape
    xs, dys = torch.randn(2, world * tokens, hidden)
    router, up, down = params = [w.detach().requires_grad_() for w in weights]
    logits = xs.requires_grad_() @ router.t()
    scores = logits.sigmoid() if sigmoid else logits.exp()
    scores = scores * F.one_hot(in_turn(experts, top_k), experts).sum(1).repeat(world, 1)
    scores = (scores / scores.sum(-1, keepdim=True) * factor).t()
    ys = sum((F.silu(xs @ u[:, :ffn]) * (xs @ u[:, ffn:]) * s[:, None]) @ d for u, d, s in zip(up, down, scores))
    ys.backward(dys)
    along = lambda params: torch.cat([(p.detach() * p.grad).flatten() for p in params])
    own = slice(rank * experts // world, (rank + 1) * experts // world)
    forward, own_params = build(shape, weights[0], weights[1][own], weights[2][own])
    x, y, dx, dy = (t.detach().view(world, tokens, 1, hidden)[rank] for t in (xs, ys, xs.grad, dys))
    own_x = x.clone().requires_grad_()
    own_y = forward(own_x)
    own_y.backward(dy)
    of_weights = along(own_params).sum()
    dist.all_reduce(of_weights)
    errors = [(a - b).abs().max() / b.abs().max() for a, b in [(own_y.detach(), y), (own_x.grad, dx)]]
    errors = torch.stack([*errors, (of_weights - along(params).sum()).abs() / along(params).abs().sum()])
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    assert errors.max() < 1e-5, errors
    return errors.tolist()


if rank != 0:
    sys.stdout = open(os.devnull, "w")
peers, failed = {}, False
if not args.no_megatron:
    for dispatcher, experts in [("alltoall", "grouped"), ("alltoall", "sequential"), ("allgather", "grouped")]:
        peers[f"Megatron-Core {dispatcher}, {experts}"] = partial(megatron, dispatcher, experts == "grouped")
if not args.no_torch:
    peers["PyTorch all-to-all"] = partial(pytorch, False)
    peers["PyTorch all-to-all, by inverse"] = partial(pytorch, True)
for name, shape in (TINY if args.tiny else SHAPES).items():
    if args.only and name not in args.only:
        continue
    torch.manual_seed(0)
    hidden, ffn, experts = shape[:3]
    held = experts if args.tiny else experts // world
    sizes = [(experts, hidden), (held, hidden, 2 * ffn), (held, ffn, hidden)]
    weights = [torch.randn(size, device=device).mul_(0.02).to(dtype) for size in sizes]
    results = {}
    for peer, build in peers.items():
        torch._dynamo.reset()  # or it would compile other shapes as if sizes varied
        try:
            results[peer] = (compared if args.tiny else measured)(build, shape, weights)
        except Exception:
            failed = True
            print(f"{name}, {peer}, rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        else:
            kinds = ("output", "input", "weights") if args.tiny else ("forward", "backward")
            for kind, value in zip(kinds, results[peer]):
                print(f"{name} {kind} {peer}\t{value:.4g}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if results and not args.tiny:
        forward, backward = min(results.values(), key=sum)
        print(f"{name} forward\t{forward:.4f}\n{name} backward\t{backward:.4f}", flush=True)
dist.destroy_process_group()
sys.exit(args.tiny and failed)
