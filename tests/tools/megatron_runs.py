"""Trains with Megatron-Core on the CPU, to compare runs that move between it and megaburn.

    pip install torch==2.11 numpy megatron-core==0.16.1
    python tests/tools/megatron_runs.py make
    python tests/tools/megatron_runs.py make-buckets
    python tests/tools/megatron_runs.py continue NAME FOLDER [TP PP DP EP]
    python tests/tools/megatron_runs.py compare MEGABURN FOLDER

The first line makes tests/fixtures/megatron-runs: for each layout a checkpoint after 10 steps, and NAME.json with the
losses of all 50 steps of the same run. A checkpoint is NAME.tar.gz, because its small files compress well. The second adds the same states in the form dp_reshardable of the distributed
optimizer, as NAME-buckets.tar.gz; some of them are not trained, but updated by random gradients. The third loads a
checkpoint, trains to step 50 under its own layout or another, and prints the losses. The last one moves each run to
megaburn, trains 20 steps there, moves it back, trains the last 20 steps with Megatron-Core again, and prints a table of the
differences: MEGABURN is the program, FOLDER a new folder.

The models are tiny, in f32, without dropout, and read tests/fixtures/megatron-dataset with Megatron-Core's GPTDataset.
Made with Python 3.11, torch 2.11 and megatron-core 0.16.1.
"""

import argparse
import contextlib
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
import zlib
from functools import partial
from pathlib import Path

# Fused operations would be compiled for minutes.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from megatron_checkpoints import LLAMA, on_ranks

FIXTURES = Path(__file__).parent.parent / "fixtures"
OUT = FIXTURES / "megatron-runs"
DATA = "tests/fixtures/megatron-dataset/data_document"
FIRST, MIDDLE, LAST = 10, 30, 50
GPT2 = dict(gated_linear_unit=False, add_bias_linear=True, normalization="LayerNorm", bias_activation_fusion=True)
EXPERTS = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=12, moe_aux_loss_coeff=0.01)


class Layout:
    """One of the runs: a model, a layout and a kind of optimizer."""

    def __init__(
        self, model, tp=1, pp=1, dp=1, ep=1, distributed=True, vocab=272, style="cosine", bucket_size=None, bf16=False
    ):
        self.model, self.tp, self.pp, self.dp, self.ep = model, tp, pp, dp, ep
        self.distributed, self.vocab, self.style, self.bf16 = distributed, vocab, style, bf16
        # The gradients of a bucket are reduced while the backward pass goes on, if the buckets have a size.
        self.bucket_size = bucket_size

    def under(self, tp, pp, dp, ep):
        return Layout(self.model, tp, pp, dp, ep, True, self.vocab, self.style)


LAYOUTS = {
    "tp2-dp2": Layout(LLAMA, tp=2, dp=2),
    "pp2": Layout(GPT2, pp=2, distributed=False, style="linear"),
    "dp2-ep2": Layout(LLAMA | EXPERTS, dp=2, ep=2, style="WSD"),
}
# Runs whose buckets hold the state of the checkpoint of the same name.
TRAINED = {
    "tp2-dp2": Layout(LLAMA, tp=2, dp=2, bucket_size=3000),
    "dp2-ep2": LAYOUTS["dp2-ep2"],
}
# Runs that random gradients have updated, in both forms. The last has the order of parameters of Transformer Engine.
UPDATED = {
    "tied-pp2-dp2": Layout(GPT2, pp=2, dp=2, vocab=48),
    "engine-bf16-tp2-dp2": Layout(LLAMA | dict(qk_layernorm=True), tp=2, dp=2, vocab=48, bucket_size=1500, bf16=True),
}


def arguments(layout):
    """What Megatron-LM's parser gives for such a run, as far as it decides on what is computed."""
    of = layout.model.get
    gpt2 = layout.model is GPT2
    return argparse.Namespace(
        num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, kv_channels=4,
        group_query_attention=not gpt2, num_query_groups=of("num_query_groups", 1),
        position_embedding_type="learned_absolute" if gpt2 else "rope", max_position_embeddings=32,
        rotary_base=10000, rotary_percent=1.0, rotary_interleaved=False, use_rope_scaling=False,
        normalization=of("normalization"), norm_epsilon=1e-5, apply_layernorm_1p=False,
        qk_layernorm=of("qk_layernorm", False),
        swiglu=not gpt2, squared_relu=False, add_bias_linear=of("add_bias_linear"), add_qkv_bias=False,
        bias_gelu_fusion=gpt2, bias_swiglu_fusion=False, multi_latent_attention=False, mtp_num_layers=None,
        untie_embeddings_and_output_weights=not gpt2, make_vocab_size_divisible_by=16, vocab_size=None,
        padded_vocab_size=layout.vocab, num_experts=of("num_moe_experts"),
        moe_ffn_hidden_size=of("moe_ffn_hidden_size"), moe_router_topk=of("moe_router_topk", 2), moe_layer_freq=1,
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=of("moe_aux_loss_coeff", 0.0),
        moe_z_loss_coeff=None, moe_router_score_function="softmax", moe_router_pre_softmax=False,
        moe_shared_expert_intermediate_size=None, moe_expert_capacity_factor=None, moe_token_drop_policy="probs",
        hidden_dropout=0.0, attention_dropout=0.0, bf16=layout.bf16, fp16=False,
        params_dtype=torch.bfloat16 if layout.bf16 else torch.float32, seed=1234, seq_length=32, micro_batch_size=2, global_batch_size=8, rampup_batch_size=None,
        train_iters=LAST, train_samples=None, eval_iters=0, eval_interval=1000, save_interval=None, log_interval=1,
        data_path=[DATA], split="90,6,4", tokenizer_type="NullTokenizer", tokenizer_model=None, dataloader_type="single",
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, calculate_per_token_loss=False,
        optimizer="adam", lr=0.01, min_lr=0.001, lr_decay_style=layout.style, lr_decay_iters=None,
        lr_warmup_iters=5, lr_warmup_init=0.0, lr_wsd_decay_style="linear", lr_wsd_decay_iters=25,
        lr_wsd_decay_samples=None, weight_decay=0.1, start_weight_decay=0.1,
        end_weight_decay=0.2 if layout.style == "linear" else 0.1, weight_decay_incr_style="linear",
        decoupled_lr=None, decoupled_min_lr=None, clip_grad=1.0, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8,
        use_distributed_optimizer=layout.distributed, use_precision_aware_optimizer=False,
        accumulate_allreduce_grads_in_fp32=True, tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp, context_parallel_size=1, expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1, sequence_parallel=False, data_parallel_size=layout.dp,
        world_size=layout.tp * layout.pp * layout.dp, consumed_train_samples=0, skipped_train_samples=0,
        ckpt_format="torch_dist", transformer_impl="transformer_engine" if layout.bf16 else "local",
        dist_ckpt_optim_fully_reshardable=True,
    )


def fused_norm_and_linear():
    """Stands in for Transformer Engine's layer, which needs a GPU: its norm is the first of its parameters."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class NormAndLinear(ColumnParallelLinear):
        def __init__(self, input_size, *args, **kwargs):
            super().__init__(input_size, *args, **kwargs)
            of_linear = dict(self._parameters)
            self._parameters.clear()
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=self.config.params_dtype))
            self._parameters.update(of_linear)

    return NormAndLinear


class Run:
    """Model, optimizer, schedules and data of a rank."""

    def __init__(self, layout):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from megatron.core.transformer.moe import moe_utils

        # Without Transformer Engine, megatron-core 0.16.1 leaves this name undefined.
        moe_utils.te_general_gemm = None
        # Dropout, which is off, would draw from a GPU's generator.
        CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
        torch.cuda.Stream = torch.cuda.Event = lambda *_, **__: None
        self.args = args = arguments(layout)
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=1
        )
        self.state = parallel_state
        self.build(layout, args)
        self.iteration = 0
        self.data = dataset(args)

    def build(self, layout, args):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.module import Float16Module

        torch.manual_seed(7)
        self.config = TransformerConfig(
            num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=args.num_attention_heads,
            ffn_hidden_size=args.ffn_hidden_size, hidden_dropout=0.0, attention_dropout=0.0,
            use_cpu_initialization=True, init_method_std=0.3, tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp, expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1, params_dtype=args.params_dtype, pipeline_dtype=args.params_dtype,
            bf16=layout.bf16,
            gradient_accumulation_fusion=False, batch_p2p_comm=False, deallocate_pipeline_outputs=True,
            moe_token_dispatcher_type="allgather", **layout.model,
        )
        spec = get_gpt_layer_local_spec(
            num_experts=layout.model.get("num_moe_experts"), normalization=args.normalization,
            qk_layernorm=args.qk_layernorm,
        )
        if args.transformer_impl == "transformer_engine":
            layer, fused = spec.submodules, fused_norm_and_linear()
            layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
            layer.self_attention.submodules.linear_qkv = layer.mlp.submodules.linear_fc1 = fused
            layer.sharded_state_dict_keys_map = {}
        model = GPTModel(
            self.config, spec, vocab_size=layout.vocab, max_sequence_length=args.seq_length,
            position_embedding_type=args.position_embedding_type, parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            pre_process=self.state.is_pipeline_first_stage(), post_process=self.state.is_pipeline_last_stage(),
        )
        if layout.bf16:
            model = Float16Module(self.config, model)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=layout.distributed, grad_reduce_in_fp32=True,
            overlap_grad_reduce=layout.bucket_size is not None, bucket_size=layout.bucket_size,
        )
        self.model = DistributedDataParallel(self.config, ddp, model)
        self.model.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=args.lr, min_lr=args.min_lr, weight_decay=args.weight_decay,
                adam_beta1=args.adam_beta1, adam_beta2=args.adam_beta2, adam_eps=args.adam_eps,
                clip_grad=args.clip_grad, use_distributed_optimizer=layout.distributed, bf16=layout.bf16,
                params_dtype=args.params_dtype,
            ),
            [self.model],
        )
        batch = args.global_batch_size
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=args.lr_warmup_init, max_lr=args.lr, min_lr=args.min_lr,
            lr_warmup_steps=args.lr_warmup_iters * batch, lr_decay_steps=args.train_iters * batch,
            lr_decay_style=args.lr_decay_style, start_wd=args.start_weight_decay, end_wd=args.end_weight_decay,
            wd_incr_steps=args.train_iters * batch, wd_incr_style=args.weight_decay_incr_style,
            wsd_decay_steps=args.lr_wsd_decay_iters * batch, lr_wsd_decay_style=args.lr_wsd_decay_style,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def step(self):
        """One step, as Megatron-LM's train_step; returns its loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        args, dp = self.args, self.state.get_data_parallel_world_size()
        rank = self.state.get_data_parallel_rank()
        num_micro_batches = args.global_batch_size // args.micro_batch_size // dp
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

        def batches():
            for micro_batch in range(num_micro_batches):
                first = args.consumed_train_samples + (micro_batch * dp + rank) * args.micro_batch_size
                samples = [self.data[first + index] for index in range(args.micro_batch_size)]
                yield {name: torch.stack([of[name] for of in samples]) for name in ["tokens", "labels", "position_ids"]}

        def forward(batches, model):
            batch = next(batches)
            mask = torch.ones(1, 1, args.seq_length, args.seq_length, dtype=torch.bool).triu(1)
            losses = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
            return losses, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

        losses = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=batches(), model=[self.model],
            num_microbatches=num_micro_batches, seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size, forward_only=False,
        )
        is_updated, _, _ = self.optimizer.step()
        assert is_updated
        self.scheduler.step(args.global_batch_size)
        args.consumed_train_samples += args.global_batch_size
        self.iteration += 1
        # Ranks of earlier stages have none.
        total = torch.zeros(2, dtype=torch.float64)
        if losses and self.state.get_tensor_model_parallel_rank() == 0:
            total += torch.tensor([sum(of["loss"].item() for of in losses), len(losses)])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def train(self, to):
        return [self.step() for _ in range(self.iteration, to)]

    def update(self):
        """One step with random gradients, the same on all ranks that hold a copy of a parameter."""
        stage, rank = self.state.get_pipeline_model_parallel_rank(), self.state.get_tensor_model_parallel_rank()
        for name, parameter in self.model.module.named_parameters():
            # The first and the last stage share the weights of a tied embedding.
            is_shared = getattr(parameter, "shared_embedding", False)
            is_divided = getattr(parameter, "tensor_model_parallel", False)
            place = ["shared" if is_shared else (stage, name), rank if is_divided else 0, self.iteration]
            torch.manual_seed(zlib.crc32(str(place).encode()))
            parameter.main_grad.copy_(torch.randn(parameter.shape))
        is_updated, _, _ = self.optimizer.step()
        assert is_updated
        self.scheduler.step(self.args.global_batch_size)
        self.args.consumed_train_samples += self.args.global_batch_size
        self.iteration += 1

    def state_dict(self, is_loading=False, form="fully_reshardable"):
        about = {
            "distrib_optim_sharding_type": form,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        group = {"dp_cp_group": self.state.get_data_parallel_group(with_context_parallel=True)}
        state = {"args": self.args, "checkpoint_version": 3.0, "iteration": self.iteration}
        module = getattr(self.model.module, "module", self.model.module)
        state["model"] = module.sharded_state_dict(metadata=about | group)
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state["model"], is_loading=is_loading, metadata=about | group
        )
        state["opt_param_scheduler"] = self.scheduler.state_dict()
        return state, about

    def save(self, folder, form="fully_reshardable"):
        from megatron.core import dist_checkpointing

        path = Path(folder) / f"iter_{self.iteration:07d}"
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        dist.barrier()
        self.args.dist_ckpt_optim_fully_reshardable = form == "fully_reshardable"
        state, about = self.state_dict(form=form)
        dist_checkpointing.save(state, str(path), content_metadata=about)
        dist.barrier()
        if dist.get_rank() == 0:
            (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(self.iteration))

    def load(self, folder):
        from megatron.core import dist_checkpointing
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        # PyTorch's Adam, which stands in for Apex's, counts the steps of each parameter too.
        set_states = DistributedOptimizer._set_main_param_and_optimizer_states
        states = lambda self, parameter, tensors: set_states(
            self, parameter, tensors if "step" in tensors else {"step": self.loaded_step} | tensors
        )
        DistributedOptimizer._set_main_param_and_optimizer_states = states
        # PyTorch's Adam has no state before its first step; what it does to the weights is loaded over.
        self.model.zero_grad_buffer()
        self.optimizer.step()
        number = (Path(folder) / "latest_checkpointed_iteration.txt").read_text()
        path = Path(folder) / f"iter_{int(number):07d}"
        state, _ = self.state_dict(is_loading=True)
        loaded, missing, unexpected = dist_checkpointing.load(state, str(path), strict="return_all")
        assert not unexpected, unexpected
        self.missing = missing
        args = loaded["args"]
        for name in ["hidden_size", "num_layers", "padded_vocab_size", "lr", "norm_epsilon"]:
            assert getattr(args, name) == getattr(self.args, name), name
        self.args.consumed_train_samples = args.consumed_train_samples
        self.iteration = loaded["iteration"]
        DistributedOptimizer.loaded_step = torch.tensor(float(self.iteration))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.scheduler.load_state_dict(loaded["opt_param_scheduler"])
        # Megatron-Core gives all parameters one tensor of steps, which PyTorch's Adam would count up for each of them.
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for state in optimizer.optimizer.state.values():
                state["step"] = torch.tensor(float(self.iteration))


def dataset(args):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    tokenizer = types.SimpleNamespace(eod=255, pad=-1, vocab_size=256, unique_identifiers={"class": "null"})
    root = FIXTURES.parent.parent
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, blend=([str(root / DATA)], None), split=args.split,
        tokenizer=tokenizer, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, path_to_cache=os.environ["MEGATRON_RUNS_CACHE"],
    )
    sizes = [args.train_iters * args.global_batch_size, 0, 0]
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return train


def first_run(rank, name, folder):
    run = Run(LAYOUTS[name])
    losses = run.train(FIRST)
    run.save(folder / name)
    losses += run.train(LAST)
    if rank == 0:
        lines = ",\n".join(json.dumps(loss) for loss in losses)
        (folder / f"{name}.json").write_text(f'{{"losses": [\n{lines}\n]}}\n')


def trained_buckets(rank, name, folder):
    run = Run(TRAINED[name])
    run.load(folder / name)
    run.save(folder / f"{name}-buckets", "dp_reshardable")


def updated_buckets(rank, name, folder):
    run = Run(UPDATED[name])
    while run.iteration < FIRST:
        run.update()
    run.save(folder / name)
    run.save(folder / f"{name}-buckets", "dp_reshardable")


def later_run(rank, name, folder, out, to, degrees):
    layout = LAYOUTS[name]
    run = Run(layout.under(*degrees) if degrees else layout.under(layout.tp, layout.pp, layout.dp, layout.ep))
    run.load(folder)
    losses = run.train(to)
    if rank == 0:
        Path(out).write_text(json.dumps(losses))


def continued(name, folder, degrees=None, to=LAST):
    """The losses of Megatron-Core's steps from a checkpoint on."""
    layout = LAYOUTS[name]
    tp, pp, dp, _ = degrees or (layout.tp, layout.pp, layout.dp, layout.ep)
    with tempfile.NamedTemporaryFile() as out:
        on_ranks(tp * pp * dp, later_run, name, Path(folder).resolve(), out.name, to, degrees)
        return json.loads(Path(out.name).read_text())


def pack(folder):
    """Replaces a folder of many small files by an archive, whose bytes depend on the files alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            member = tarfile.TarInfo(str(path.relative_to(folder.parent)))
            member.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(member, file)
    Path(f"{folder}.tar.gz").write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
    shutil.rmtree(folder)


def unpack(name, to):
    with tarfile.open(OUT / f"{name}.tar.gz") as tar:
        tar.extractall(to, filter="data")
    return to / name


def make():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    for name, layout in LAYOUTS.items():
        on_ranks(layout.tp * layout.pp * layout.dp, first_run, name, OUT)
        pack(OUT / name)
        print(name, "is made")


def make_buckets():
    for layouts, function in [(TRAINED, trained_buckets), (UPDATED, updated_buckets)]:
        for name, layout in layouts.items():
            with tempfile.TemporaryDirectory() as folder:
                folder = Path(folder)
                if layouts is TRAINED:
                    unpack(name, folder)
                on_ranks(layout.tp * layout.pp * layout.dp, function, name, folder)
                made = [folder / f"{name}-buckets", *([folder / name] if layouts is UPDATED else [])]
                for path in made:
                    pack(path)
                    shutil.copy(f"{path}.tar.gz", OUT)
            print(name, "is made")


# For each run, another layout in megaburn, and another in Megatron-Core: tp, pp, dp and ep.
OTHERS = {"tp2-dp2": ("pp2-dp2", (1, 2, 1, 1)), "pp2": ("tp2-sp", (2, 1, 2, 1)), "dp2-ep2": ("tp2-sp", (1, 1, 1, 1))}


def in_megaburn(program, run, layout):
    """The losses of megaburn's steps after the checkpoint."""
    flags = ["--resume", run, "--layout", layout, "--set", f"train.exit_at_step={MIDDLE}"]
    subprocess.run([program, "train", *flags], cwd=FIXTURES.parent.parent, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "grad_norm" in line]


def compare(program, folder):
    program, folder = Path(program).resolve(), Path(folder).resolve()
    folder.mkdir()
    rows = [["run", "steps", "trained by", "layout", "largest difference", "mean", "of losses"]]

    def row(name, by, layout, first, found):
        expected = json.loads((OUT / f"{name}.json").read_text())["losses"][first : first + len(found)]
        assert len(found) == 20, len(found)
        differences = [abs(a - b) for a, b in zip(found, expected)]
        mean = sum(differences) / len(differences)
        numbers = [f"{max(differences):.1e}", f"{mean:.1e}", f"{min(expected):.2f} to {max(expected):.2f}"]
        rows.append([name, f"{first + 1} to {first + len(found)}", by, layout, *numbers])
        print(*rows[-1], flush=True)
        assert max(differences) < 1e-4, rows[-1]

    def convert(command, *paths):
        subprocess.run([program, "checkpoint", command, *paths], check=True, stdout=subprocess.DEVNULL)

    for name, (other, degrees) in OTHERS.items():
        for number, layout in enumerate([name, other]):
            run = folder / f"{name}-{number}"
            convert("from-megatron", unpack(name, folder / f"{name}-{number}-first"), run)
            row(name, "megaburn", layout, FIRST, in_megaburn(program, run, layout))
        run = folder / f"{name}-0"
        at_once, back = folder / f"{name}-at-once", folder / f"{name}-back"
        convert("to-megatron", run / "checkpoints" / f"step-{FIRST:08}", at_once)
        convert("to-megatron", run, back)
        # With expert parallelism, the optimizer of experts is another.
        other_back = folder / f"{name}-other"
        convert("to-megatron", run, other_back, "--ep", str(degrees[3]))
        their = "tp{}-pp{}-dp{}-ep{}".format(*degrees)
        row(name, "Megatron-Core, moved here and back", name, FIRST, continued(name, at_once, to=MIDDLE))
        row(name, "Megatron-Core, after megaburn's 20", name, MIDDLE, continued(name, back))
        row(name, "Megatron-Core, after megaburn's 20", their, MIDDLE, continued(name, other_back, degrees))
    for line in [rows[0], ["---"] * len(rows[0]), *rows[1:]]:
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MEGATRON_RUNS_CACHE"] = cache
        command, *rest = sys.argv[1:]
        if command == "make":
            make()
        elif command == "make-buckets":
            make_buckets()
        elif command == "continue":
            print(*continued(*rest[:2], tuple(map(int, rest[2:])) or None), sep="\n")
        else:
            compare(*rest)
