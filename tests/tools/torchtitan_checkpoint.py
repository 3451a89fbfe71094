"""Makes tests/fixtures/torchtitan: checkpoints of torchtitan's Llama 3, and what torchtitan computes with them.

    pip install torch==2.11 torchtitan==0.2.2 safetensors
    python tests/tools/torchtitan_checkpoint.py

The model, its optimizer and the wrappers of their state are torchtitan's own (0.2.2, on the CPU); so is the
mapping of gradients to the names of Hugging Face, in which rows of wq and wk have another order.

    flat/    what 0.2.2 saves after a step on 2 ranks of FSDP2: weights at the top, `optimizer.`, `train_state.`, ...
    nested/  the weights as 0.1.0 saved them: under `model.`, with the buffer `freqs_cis`; in bf16
    renamed/ the weights with the names of 0.3.0 (`qkv_linear`, `lm_head`), which needs a nightly PyTorch; in bf16

flat/ also has a config.json with the keys that the tensors do not tell, and reference.safetensors and
reference.json as hf_reference.py writes them, so that `megaburn verify` compares with torchtitan.
Made with Python 3.11 and torch 2.11.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from safetensors.torch import save_file

OUT = Path(__file__).parent.parent / "fixtures" / "torchtitan"
NUM_RANKS = 2
SCALING = RoPEScalingArgs(scaling_factor=4.0, original_max_position_embeddings=16)
ARGS = TransformerModelArgs(
    dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=131, multiple_of=8, rope_theta=500000.0, max_seq_len=64,
    rope_scaling_args=SCALING,
)
# What a checkpoint does not tell.
CONFIG = {
    "num_attention_heads": ARGS.n_heads,
    "rms_norm_eps": ARGS.norm_eps,
    "max_position_embeddings": ARGS.max_seq_len,
    "rope_theta": ARGS.rope_theta,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": SCALING.scaling_factor,
        "low_freq_factor": SCALING.low_freq_factor,
        "high_freq_factor": SCALING.high_freq_factor,
        "original_max_position_embeddings": SCALING.original_max_position_embeddings,
    },
}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def model():
    """A model with random weights: those of norms differ from 1, which hides mistakes."""
    torch.manual_seed(30)
    made = Transformer(ARGS)
    for parameter in made.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return made


def loss_of(logits, tokens):
    logits, labels = logits[:, :-1], tokens[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def flat(rank, folder):
    """Trains a step, saves, and leaves the whole weights in a file."""
    made = model()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for layer in made.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    optimizers = OptimizersContainer([made], torch.optim.AdamW, dict(ADAMW))
    tokens = torch.randint(0, ARGS.vocab_size, (2, 16))
    loss_of(made(tokens), tokens).backward()
    optimizers.step()
    states = {
        "optimizer": optimizers,
        "lr_scheduler": {"last_epoch": 1},
        "dataloader": {f"dp_rank_{rank}": b"\x80\x04K\x01."},
        "train_state": {"step": 1, "ntokens_seen": tokens.numel()},
    }
    weights = ModelWrapper(made).state_dict()
    dcp.save(states | weights, checkpoint_id=OUT / "flat")
    whole = {name: tensor.full_tensor() for name, tensor in weights.items()}
    if rank == 0:
        torch.save(whole, Path(folder) / "whole.pt")


def on_rank(rank, folder):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    torch.set_num_threads(1)
    flat(rank, folder)
    dist.barrier()
    # Some libraries abort when they are unloaded in another order.
    os._exit(0)


def reference(weights):
    """What the model computes: logits, loss and gradients of a batch, and losses of 8 steps on it."""
    made = Transformer(ARGS)
    made.load_state_dict(weights)
    torch.manual_seed(31)
    tokens = torch.randint(0, ARGS.vocab_size, (3, 40))
    logits = made(tokens)
    loss = loss_of(logits, tokens)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in made.named_parameters()}
    grads = Llama3StateDictAdapter(ARGS, None).to_hf(grads)
    tensors = {"input_ids": tokens, "labels": tokens, "logits": logits, "loss": loss.reshape(1)}
    tensors |= {f"grad.{name}": tensor for name, tensor in grads.items()}
    groups = [[p for p in made.parameters() if (p.dim() >= 2) == is_matrix] for is_matrix in (True, False)]
    groups = [{"params": of, "weight_decay": decay} for of, decay in zip(groups, (0.1, 0.0))]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = loss_of(made(tokens), tokens)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    tensors["train_losses"] = torch.tensor(losses)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, OUT / "flat" / "reference.safetensors")
    about = {
        "family": "llama",
        "torch": torch.__version__,
        "torchtitan": "0.2.2",
        "optimizer": ADAMW | {"name": "AdamW", "weight_decay": 0.1, "decay": "parameters of rank >= 2", "clip": None},
        "loss": "mean cross entropy over predicted tokens",
    }
    (OUT / "flat" / "reference.json").write_text(json.dumps(about, indent=1) + "\n")


def name_of_0_3(name):
    name = re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name)
    return {"output.weight": "lm_head.weight"}.get(name, name)


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, (folder,), NUM_RANKS)
        weights = torch.load(Path(folder) / "whole.pt")
    (OUT / "flat" / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    reference(weights)
    narrow = {name: tensor.bfloat16() for name, tensor in weights.items()}
    freqs_cis = Transformer(ARGS).freqs_cis
    dcp.save({"model": narrow | {"freqs_cis": freqs_cis}}, checkpoint_id=OUT / "nested", no_dist=True)
    dcp.save({name_of_0_3(name): of for name, of in narrow.items()}, checkpoint_id=OUT / "renamed", no_dist=True)


if __name__ == "__main__":
    sys.exit(main())
