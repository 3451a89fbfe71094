"""Makes tests/fixtures/megatron-checkpoints with Megatron-Core, and checks with it what megaburn-torch writes.

    pip install torch==2.11 numpy megatron-core==0.16.1 transformers==5.24
    python tests/tools/megatron_checkpoints.py make
    python tests/tools/megatron_checkpoints.py names MODEL [TP PP DP EP]
    python tests/tools/megatron_checkpoints.py logits
    MEGABURN_TORCH_CHECK=FOLDER cargo test -p megaburn-torch && python tests/tools/megatron_checkpoints.py check FOLDER

The first line makes checkpoints of torch_dist with random weights and optimizer states, written by several processes, in
both forms of the optimizer's state; next to each is NAME.json with its whole tensors. The second prints what a checkpoint
of a model holds, and the third compares the logits of models with those of Transformers, which has the same tensors under
the names of docs/megatron-checkpoints.md. The last one loads with Megatron-Core what the tests of the crate wrote.
All of it runs on the CPU: what Megatron-Core puts onto a GPU is put onto the CPU.
Made with Python 3.11, torch 2.11 and megatron-core 0.16.1.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

OUT = Path(__file__).parent.parent / "fixtures" / "megatron-checkpoints"
NUM_LAYERS, VOCAB, SEQ_LEN = 2, 32, 8
LLAMA = dict(
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    add_bias_linear=False,
    normalization="RMSNorm",
    num_query_groups=2,
)
MODELS = {
    "llama": LLAMA,
    "llama-qk-norm": LLAMA | dict(qk_layernorm=True, add_qkv_bias=True),
    "gpt2": dict(gated_linear_unit=False, add_bias_linear=True, normalization="LayerNorm"),
    "moe": LLAMA | dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=12),
    "moe-shared": LLAMA
    | dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=12)
    | dict(moe_shared_expert_intermediate_size=20, moe_layer_freq=[0, 1]),
    "mtp": LLAMA | dict(mtp_num_layers=1),
    "moe-bias": LLAMA
    | dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=12)
    | dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
}


class OnCpu(torch.overrides.TorchFunctionMode):
    """Puts tensors onto the CPU that were to be put onto a GPU, and says that they are there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def on_ranks(num_ranks, function, *args):
    """Runs a function on processes that are connected, each with its rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, (num_ranks, folder, function, args), num_ranks)


def on_rank(rank, num_ranks, folder, function, args):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.set_num_threads(1)
    OnCpu().__enter__()
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=num_ranks)
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    # It only logs the memory.
    filesystem_async._process_memory = lambda: 0
    function(rank, *args)
    dist.barrier()
    # Megatron-Core leaves processes that would wait for more to write.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


def build(name, tp, pp, ep=1):
    """A model with random weights, in bf16, and its distributed optimizer after one step."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    torch.manual_seed(30 + dist.get_rank())
    options = MODELS[name]
    config = TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=24,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        sequence_parallel=tp > 1 and ep > 1,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        **options,
    )
    if isinstance(options.get("moe_layer_freq"), list):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=options.get("num_moe_experts"),
            qk_layernorm=options.get("qk_layernorm", False),
            normalization=options["normalization"],
        )
    predicts = options.get("mtp_num_layers") and parallel_state.is_pipeline_last_stage()
    mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if predicts else None
    is_gpt2 = name == "gpt2"
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ_LEN,
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
        share_embeddings_and_output_weights=is_gpt2,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        mtp_block_spec=mtp_spec,
    ).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, ddp_config, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=0.1, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        ),
        [wrapped],
    )
    for parameter in wrapped.parameters():
        parameter.main_grad.copy_(torch.randn_like(parameter.main_grad))
    optimizer.step()
    return model, optimizer


def state_dict(model, optimizer, form, is_loading=False):
    """What Megatron-LM saves, without what depends on the run."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    about = {
        "distrib_optim_sharding_type": form,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    group = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": model.sharded_state_dict(metadata=about | group)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=about | group)
    tp, pp = parallel_state.get_tensor_model_parallel_rank, parallel_state.get_pipeline_model_parallel_rank
    ranks = (pp(), tp())
    world = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    rng = [{"random_rng_state": random.Random(30).getstate(), "torch_rng_state": torch.arange(5, dtype=torch.uint8)}]
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    state["rng_state"] = ShardedObject("rng_state", rng, world, ranks, replica_id=replica)
    state["args"] = argparse.Namespace(num_layers=NUM_LAYERS, hidden_size=16, lr=0.1, swiglu=True, data_path=None)
    state |= {"checkpoint_version": 3.0, "iteration": 10}
    return state, about


def save(rank, folder, name, tp, pp, ep, form):
    from megatron.core import dist_checkpointing

    model, optimizer = build(name, tp, pp, ep)
    state, about = state_dict(model, optimizer, form)
    folder = Path(folder) / "iter_0000010"
    if rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), content_metadata=about)
    dist.barrier()
    if rank == 0:
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("10")


def load_plain(folder):
    """The whole tensors of a checkpoint, by torch itself."""
    import torch.distributed.checkpoint as dcp

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    tensors = {
        name: torch.zeros(of.size, dtype=of.properties.dtype)
        for name, of in metadata.state_dict_metadata.items()
        if hasattr(of, "size")
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def raw(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def make():
    shutil.rmtree(OUT, ignore_errors=True)
    for name, model, tp, pp, dp, form in [
        ("tp2-pp2", "llama", 2, 2, 1, "fully_reshardable"),
        ("dp2", "gpt2", 1, 1, 2, "dp_reshardable"),
    ]:
        on_ranks(tp * pp * dp, save, OUT / name, model, tp, pp, 1, form)
        tensors = load_plain(OUT / name / "iter_0000010")
        about = {
            name: {"dtype": str(of.dtype).removeprefix("torch."), "shape": list(of.shape), "crc32": zlib.crc32(raw(of))}
            for name, of in tensors.items()
        }
        (OUT / f"{name}.json").write_text(json.dumps(about, indent=0))


def names(model, tp=1, pp=1, dp=1, ep=1):
    tp, pp, dp, ep = map(int, (tp, pp, dp, ep))
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(tp * pp * dp, save, folder, model, tp, pp, ep, "fully_reshardable")
        metadata = pickle.loads((Path(folder) / "iter_0000010" / ".metadata").read_bytes())
        for name, of in sorted(metadata.state_dict_metadata.items()):
            if hasattr(of, "size"):
                print(name, list(of.size), of.properties.dtype, [list(chunk.offsets) for chunk in of.chunks][:8])
            else:
                print(name)


def load_written(rank, folder, tp, pp):
    """Loads a model and its optimizer under another layout, and compares them with the original."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    written = folder / "megatron" / "iter_0000020"
    model, optimizer = build("llama", tp, pp)
    state, _ = state_dict(model, optimizer, "fully_reshardable", is_loading=True)
    del state["rng_state"]
    loaded, missing, unexpected = dist_checkpointing.load(state, str(written), strict="return_all")
    assert (missing, unexpected) == ({"rng_state"}, set()), (missing, unexpected)
    assert (loaded["iteration"], loaded["args"].hidden_size) == (20, 16), loaded["iteration"]
    model.load_state_dict(loaded["model"])
    # PyTorch's Adam, which stands in for Apex's, counts the steps of each parameter too.
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = lambda self, parameter, tensors: set_states(
        self, parameter, {"step": torch.tensor(1.0)} | tensors
    )
    optimizer.load_state_dict(loaded["optimizer"])
    # What is saved from there is what was written.
    again = folder / f"again-{tp}-{pp}"
    save_again(rank, again, model, optimizer)
    if rank == 0:
        original = load_plain(OUT / "tp2-pp2" / "iter_0000010")
        tensors = load_plain(again)
        assert sorted(tensors) == sorted(original), sorted(set(tensors) ^ set(original))
        different = [name for name, of in tensors.items() if raw(of) != raw(original[name])]
        assert not different, different


def save_again(rank, folder, model, optimizer):
    from megatron.core import dist_checkpointing

    if rank == 0:
        folder.mkdir()
    dist.barrier()
    state, about = state_dict(model, optimizer, "fully_reshardable")
    dist_checkpointing.save(state, str(folder), content_metadata=about)
    dist.barrier()


def check(folder):
    folder = Path(folder).resolve()
    for tp, pp in [(1, 1), (2, 1), (1, 2)]:
        shutil.rmtree(folder / f"again-{tp}-{pp}", ignore_errors=True)
        on_ranks(tp * pp, load_written, folder, tp, pp)
        print(f"megatron.core.dist_checkpointing loads it with tp {tp} and pp {pp}")


def transformers_of(name, tensors):
    """The weights of Transformers' model from the tensors of a checkpoint, as docs/megatron-checkpoints.md says."""
    heads, head = 4, 4
    groups = MODELS[name].get("num_query_groups", heads)
    decoder = {key.removeprefix("decoder.layers."): of.float() for key, of in tensors.items() if "decoder.layers." in key}
    top = {key: tensors[key].float() for key in tensors if "decoder.layers." not in key}

    def parts(of):
        """Queries, keys and values from rows that are grouped as [q..q, k, v]."""
        grouped = of.unflatten(0, (groups, heads // groups + 2, head))
        split = grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]
        return [part.flatten(0, 2) for part in split]

    weights = {}
    if name == "gpt2":
        weights["transformer.wte.weight"] = weights["lm_head.weight"] = top["embedding.word_embeddings.weight"]
        weights["transformer.wpe.weight"] = top["embedding.position_embeddings.weight"]
        norms = {"self_attention.linear_qkv": "ln_1", "mlp.linear_fc1": "ln_2"}
        plain = {"self_attention.linear_proj": "attn.c_proj", "mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}
        for kind in ["weight", "bias"]:
            weights[f"transformer.ln_f.{kind}"] = top[f"decoder.final_layernorm.{kind}"]
            for layer in range(NUM_LAYERS):
                of = lambda key: decoder[key][layer]
                to = f"transformer.h.{layer}."
                for key, norm in norms.items():
                    weights[f"{to}{norm}.{kind}"] = of(f"{key}.layer_norm_{kind}")
                for key, linear in plain.items():
                    weights[f"{to}{linear}.{kind}"] = of(f"{key}.{kind}").t()
                weights[f"{to}attn.c_attn.{kind}"] = torch.cat(parts(of(f"self_attention.linear_qkv.{kind}"))).t()
        return {key: of if of.dim() < 2 else of.contiguous() for key, of in weights.items()}
    weights["model.embed_tokens.weight"] = top["embedding.word_embeddings.weight"]
    weights["lm_head.weight"] = top["output_layer.weight"]
    weights["model.norm.weight"] = top["decoder.final_layernorm.weight"]
    for layer in range(NUM_LAYERS):
        of = lambda key: decoder[key][layer]
        to = f"model.layers.{layer}."
        weights[f"{to}input_layernorm.weight"] = of("self_attention.linear_qkv.layer_norm_weight")
        weights[f"{to}post_attention_layernorm.weight"] = of("mlp.linear_fc1.layer_norm_weight")
        weights[f"{to}self_attn.o_proj.weight"] = of("self_attention.linear_proj.weight")
        for part, rows in zip("qkv", parts(of("self_attention.linear_qkv.weight"))):
            weights[f"{to}self_attn.{part}_proj.weight"] = rows
        if name == "moe":
            weights[f"{to}mlp.gate.weight"] = of("mlp.router.weight")
            weights[f"{to}mlp.experts.gate_up_proj"] = of("mlp.experts.experts.linear_fc1.weight")
            weights[f"{to}mlp.experts.down_proj"] = of("mlp.experts.experts.linear_fc2.weight")
        else:
            gate, up = of("mlp.linear_fc1.weight").chunk(2)
            weights[f"{to}mlp.gate_proj.weight"], weights[f"{to}mlp.up_proj.weight"] = gate, up
            weights[f"{to}mlp.down_proj.weight"] = of("mlp.linear_fc2.weight")
    return weights


def compare_logits(rank, name, folder):
    """Compares the logits of Megatron-Core with those of Transformers' model with the same tensors."""
    import transformers
    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine, megatron-core 0.16.1 leaves this name undefined.
    moe_utils.te_general_gemm = None
    # Dropout, which is off, would draw from a GPU's generator.
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    model, optimizer = build(name, 1, 1)
    state, about = state_dict(model, optimizer, "fully_reshardable")
    dist_checkpointing.save(state, folder, content_metadata=about)
    tensors = load_plain(Path(folder))
    sizes = dict(vocab_size=VOCAB, hidden_size=16, num_attention_heads=4, num_hidden_layers=NUM_LAYERS)
    llama = dict(intermediate_size=24, num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False)
    llama["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=16, n_head=4, n_layer=NUM_LAYERS, n_inner=24, n_positions=SEQ_LEN,
            activation_function="gelu",
        )
        other = transformers.GPT2LMHeadModel(config)
    elif name == "moe":
        llama |= dict(intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
        other = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **llama))
    else:
        other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **llama))
    other.load_state_dict(transformers_of(name, tensors))
    tokens = torch.randint(0, VOCAB, (2, SEQ_LEN))
    positions = torch.arange(SEQ_LEN).expand(2, -1)
    mask = torch.ones(1, 1, SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu(1)
    # In f32, so that only the order of sums differs.
    model.config.bf16, model.config.params_dtype = False, torch.float32
    for module in model.modules():
        if hasattr(module, "input_in_float16"):
            module.input_in_float16 = module.input_in_bf16 = False
    with torch.no_grad():
        model = model.eval().float()
        found = model(tokens, positions, mask).float()
        expected = other.eval()(tokens).logits
    largest = (found - expected).abs().max().item()
    assert largest < 1e-3 * expected.abs().max().item(), largest
    print(f"{name}: the logits differ by {largest:.1e} at most, of {expected.abs().max().item():.1f}")


def logits(*names):
    for name in names or ["llama", "gpt2", "moe"]:
        with tempfile.TemporaryDirectory() as folder:
            on_ranks(1, compare_logits, name, folder)


if __name__ == "__main__":
    {"make": make, "names": names, "check": check, "logits": logits}[sys.argv[1]](*sys.argv[2:])
