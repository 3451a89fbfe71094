"""PyTorch's training steps of the whole small models of `bench-models`: prints NAME, a tab, milliseconds.

As nanoGPT trains: f32 parameters, bf16 by autocast, flash attention, fused AdamW, the gradient clipped to 1;
once eager and once with torch.compile. `--only NAME` takes the models whose names begin so.
"""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Gpt2Block(nn.Module):
    def __init__(self, hidden, heads, kv_heads, ffn):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).split(d, 2)
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class LlamaBlock(nn.Module):
    bias = False

    def __init__(self, hidden, heads, kv_heads, ffn):
        super().__init__()
        d = hidden // heads
        self.heads, self.kv_heads, self.d = heads, kv_heads, d
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * d, bias=self.bias)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        d, kv = self.d, self.kv_heads
        parts = self.qkv(self.norm1(x)).split([self.heads * d, kv * d, kv * d], -1)
        q, k, v = (part.view(b, t, -1, d).transpose(1, 2) for part in parts)

        def rotated(y):
            return y * cos + torch.cat((-y[..., d // 2 :], y[..., : d // 2]), -1) * sin

        y = F.scaled_dot_product_attention(
            rotated(q).to(v.dtype), rotated(k).to(v.dtype), v, is_causal=True, enable_gqa=kv != self.heads
        )
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Qwen2Block(LlamaBlock):
    bias = True


class Model(nn.Module):
    def __init__(self, block, vocab, hidden, layers, heads, kv_heads, ffn, seq_len):
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        gpt2 = block is Gpt2Block
        self.positions = nn.Embedding(seq_len, hidden) if gpt2 else None
        self.blocks = nn.ModuleList(block(hidden, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden) if gpt2 else nn.RMSNorm(hidden, eps=1e-5)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02)
        d = hidden // heads
        angles = torch.outer(torch.arange(seq_len), 1.0 / 10000 ** (torch.arange(0, d, 2) / d))
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids):
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        # Tied, as the model's.
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), ids.view(-1))


# As megaburn, vocabularies are padded to a multiple of 128.
GPT2 = (Gpt2Block, 50304, 768, 12, 12, 12, 3072, 1024)
LLAMA = (LlamaBlock, 50304, 768, 12, 12, 12, 2048, 1024)
QWEN2 = (Qwen2Block, 151936, 896, 24, 14, 2, 4864, 2048)
CASES = [
    ("gpt2 16x1", GPT2, 16, 1),
    ("gpt2 1x16", GPT2, 1, 16),
    ("llama 16x1", LLAMA, 16, 1),
    ("llama 1x16", LLAMA, 1, 16),
    ("qwen2 4x1", QWEN2, 4, 1),
    ("qwen2 1x4", QWEN2, 1, 4),
]


def measured(name, shape, micro_batch, micro_batches, compiled, steps):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model(*shape).cuda()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    ids = torch.randint(0, shape[1], (micro_batch, shape[-1]), device="cuda")

    def step():
        for _ in range(micro_batches):
            with torch.autocast("cuda", torch.bfloat16):
                loss = forward(ids) / micro_batches
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    for _ in range(5):
        step()
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    median = sorted(times)[len(times) // 2]
    print(f"{name} {'compile' if compiled else 'eager'}\t{median * 1e3:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    for name, shape, micro_batch, micro_batches in CASES:
        if not name.startswith(args.only):
            continue
        for compiled in (False, True):
            measured(name, shape, micro_batch, micro_batches, compiled, args.steps)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
