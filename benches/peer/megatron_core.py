"""Megatron-Core itself (the pip wheel, no Transformer Engine or Apex: local layer spec with PyTorch's cuDNN attention
and PyTorch's fused AdamW under Megatron's own DDP / distributed optimizer / pipeline schedules).

    pip install megatron-core==0.16.1
    torchrun --nproc-per-node 8 megatron_core.py --tp 2 --pp 1 --layers 32 --seq-len 8192 --micro-batches 4

Prints NAME, a tab, milliseconds of a step, and of NAME its micro-batches, tokens a GPU and GiB that tensors took at
most, for `bench-layouts --peer`."""
import argparse, os, time, torch, torch.distributed as dist, torch.nn.functional as F
from functools import partial
ap = argparse.ArgumentParser()
for k, v in dict(tp=1, pp=1, cp=1, layers=32, seq_len=8192, mb=1, micro_batches=4, steps=6).items(): ap.add_argument("--" + k.replace("_", "-"), type=int, default=v)
a = ap.parse_args()
CPU = not torch.cuda.is_available(); dev = "cpu" if CPU else "cuda"
local = int(os.environ["LOCAL_RANK"])
if not CPU: torch.cuda.set_device(local)
dist.init_process_group("gloo" if CPU else "nccl")
from megatron.core import parallel_state as ps, tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer, OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.enums import AttnMaskType
ps.initialize_model_parallel(a.tp, a.pp, context_parallel_size=a.cp)
tensor_parallel.model_parallel_cuda_manual_seed(1) if not CPU else None
HID, H, KV, FFN, V = (4096, 32, 8, 14336, 128256) if not CPU else (64, 4, 2, 128, 256)
cfg = TransformerConfig(num_layers=a.layers, hidden_size=HID, num_attention_heads=H, num_query_groups=KV, ffn_hidden_size=FFN,
    add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, normalization="RMSNorm", layernorm_epsilon=1e-5,
    tensor_model_parallel_size=a.tp, pipeline_model_parallel_size=a.pp, context_parallel_size=a.cp, sequence_parallel=False,
    bf16=not CPU, params_dtype=torch.float32 if CPU else torch.bfloat16, pipeline_dtype=torch.float32 if CPU else torch.bfloat16,
    hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=True, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    use_cpu_initialization=CPU, autocast_dtype=torch.bfloat16, deallocate_pipeline_outputs=True, apply_rope_fusion=False)

class Sdpa(torch.nn.Module):
    """core attention: [s, b, heads, dim] in, [s, b, heads*dim] out"""
    def __init__(self, config, **kw): super().__init__()
    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **kw):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.MATH]):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return o.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
spec = get_gpt_layer_local_spec(normalization="RMSNorm")
spec.submodules.self_attention.submodules.core_attention = Sdpa
m = GPTModel(cfg, spec, vocab_size=V, max_sequence_length=a.seq_len, pre_process=ps.is_pipeline_first_stage(), post_process=ps.is_pipeline_last_stage(),
    share_embeddings_and_output_weights=False, position_embedding_type="rope", rotary_base=500000, parallel_output=True).to(dev)
if not CPU: m = m.bfloat16()
m = DistributedDataParallel(cfg, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=False), m)
opt = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-5, bf16=not CPU, params_dtype=cfg.params_dtype, use_distributed_optimizer=True, clip_grad=1.0), [m])
cfg.finalize_model_grads_func = finalize_model_grads
cfg.no_sync_func = m.no_sync; cfg.grad_scale_func = opt.scale_loss
def data():
    while True:
        t = torch.randint(0, V, (a.mb, a.seq_len), device=dev); yield t
def fwd(it, model):
    t = next(it)
    out = model(t, torch.arange(a.seq_len, device=dev).unsqueeze(0).expand(a.mb, -1), None, labels=t)
    return out, lambda o: (o.float().mean(), {"loss": o.float().mean().detach()})
it = data(); fb = get_forward_backward_func()
def step():
    m.zero_grad_buffer(); opt.zero_grad()
    r = fb(forward_step_func=fwd, data_iterator=it, model=[m], num_microbatches=a.micro_batches, seq_length=a.seq_len, micro_batch_size=a.mb, forward_only=False)
    opt.step(); return r
sync = (lambda: None) if CPU else torch.cuda.synchronize
for _ in range(3): r = step()
sync(); dist.barrier(); t0 = time.time()
for _ in range(a.steps): r = step()
sync(); dist.barrier(); dt = (time.time() - t0) / a.steps
world = dist.get_world_size(); dp = world // (a.tp * a.pp * a.cp); toks = dp * a.micro_batches * a.mb * a.seq_len
mem = torch.tensor([0 if CPU else torch.cuda.max_memory_allocated() / 2**30], device=dev); dist.all_reduce(mem, op=dist.ReduceOp.MAX)
if dist.get_rank() == world - 1:
    name = f"Megatron-Core 0.16.1 tp{a.tp}-pp{a.pp}-cp{a.cp}-dp{dp}, {a.micro_batches} micro-batches"
    for what, value in {"": dt * 1e3, " micro-batches": a.micro_batches, " tokens": toks / world, " GiB": mem.item()}.items():
        print(f"{name}{what}\t{value:.2f}", flush=True)
dist.destroy_process_group()
