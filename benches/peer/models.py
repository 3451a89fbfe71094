"""PyTorch's training steps of the models of `bench-models`: prints NAME, a tab, milliseconds.

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


class Gpt7bBlock(Gpt2Block):
    """As GPT-2's, with fewer heads of keys and values."""

    def __init__(self, hidden, heads, kv_heads, ffn):
        super().__init__(hidden, heads, kv_heads, ffn)
        self.sizes = [hidden, kv_heads * hidden // heads, kv_heads * hidden // heads]
        self.qkv = nn.Linear(hidden, sum(self.sizes))

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).split(self.sizes, 2)
        q, k, v = (part.view(b, t, -1, d // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class BertBlock(Gpt2Block):
    """Norms of the residual stream; `mask` is true for tokens that are no padding."""

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(d, 2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.out(y.transpose(1, 2).reshape(b, t, d)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """BertForPreTraining: the losses of 15% of the tokens and of the order of the segments."""

    def __init__(self, vocab, hidden, layers, heads, ffn, seq_len, padded):
        super().__init__()
        self.padded = padded
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(seq_len, hidden)
        self.types, self.norm = nn.Embedding(2, hidden), nn.LayerNorm(hidden)
        self.blocks = nn.ModuleList(BertBlock(hidden, heads, heads, ffn) for _ in range(layers))
        self.dense, self.head_norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.bias = nn.Parameter(torch.zeros(vocab))
        self.pooler, self.order = nn.Linear(hidden, hidden), nn.Linear(hidden, 2)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02)

    def forward(self, ids, mask, labels, order):
        x = self.tokens(ids) + self.positions.weight + self.types.weight[0]
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, mask)
        first = torch.tanh(self.pooler(x[:, 0]))
        y = self.head_norm(F.gelu(self.dense(x)))
        logits = F.linear(y, self.tokens.weight, self.bias)
        masked = F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))
        return masked + F.cross_entropy(self.order(first).float(), order)

    def batch(self, rows):
        seq_len = self.positions.num_embeddings
        ids = torch.randint(0, self.tokens.num_embeddings, (rows, seq_len), device="cuda")
        held = torch.full((rows, 1), seq_len, device="cuda")
        if self.padded:
            held[:: 10] = seq_len // 2  # A tenth is cut, to half the length on average.
        is_text = torch.arange(seq_len, device="cuda")[None] < held
        labels = torch.where((torch.rand(rows, seq_len, device="cuda") < 0.15) & is_text, ids, -100)
        mask = is_text[:, None, None] if self.padded else None
        return ids, mask, labels, torch.zeros(rows, dtype=torch.long, device="cuda")


class T5Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, memory, mask):
        b, _, d = x.shape
        q, k, v = self.q(x), *self.kv(memory).chunk(2, -1)
        q, k, v = (part.view(b, part.shape[1], self.heads, -1).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class T5Block(nn.Module):
    def __init__(self, hidden, heads, ffn, crossed):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-6) for _ in range(3 if crossed else 2))
        self.attention = T5Attention(hidden, heads)
        self.cross = T5Attention(hidden, heads) if crossed else None
        self.up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x, mask, memory=None, memory_mask=None):
        y = self.norms[0](x)
        x = x + self.attention(y, y, mask)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory, memory_mask)
        gate, up = self.up(self.norms[-1](x)).chunk(2, -1)
        return x + self.down(F.gelu(gate, approximate="tanh") * up)


class T5(nn.Module):
    """T5 1.1, with the padding of the encoder's rows masked."""

    def __init__(self, vocab, hidden, layers, heads, ffn, lens):
        super().__init__()
        self.lens = lens
        self.tokens, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)
        self.encoder = nn.ModuleList(T5Block(hidden, heads, ffn, False) for _ in range(layers))
        self.decoder = nn.ModuleList(T5Block(hidden, heads, ffn, True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-6) for _ in range(2))
        self.tables = nn.ModuleList(nn.Embedding(32, heads) for _ in range(2))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02)
        for name, length in zip(("of_encoder", "of_decoder"), lens):
            at = torch.arange(length)
            self.register_buffer(name, (at[None] - at[:, None]).clamp(-15, 15) + 15)

    def forward(self, ids, targets, padding):
        dtype = torch.get_autocast_dtype("cuda")
        tables = (table(of).permute(2, 0, 1)[None].to(dtype) for table, of in zip(self.tables, (self.of_encoder, self.of_decoder)))
        bias, causal = tables
        x = self.tokens(ids)
        for block in self.encoder:
            x = block(x, bias + padding)
        memory = self.norms[0](x)
        later = torch.full((self.lens[1],) * 2, -1e4, dtype=dtype, device=ids.device).triu(1)
        x = self.tokens(targets)
        for block in self.decoder:
            x = block(x, causal + later, memory, padding)
        logits = self.head(self.norms[1](x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))

    def batch(self, rows):
        ids, targets = (torch.randint(0, self.tokens.num_embeddings, (rows, n), device="cuda") for n in self.lens)
        padding = torch.zeros(rows, 1, 1, self.lens[0], dtype=torch.bfloat16, device="cuda")
        padding[..., -self.lens[0] // 8 :] = -1e4
        return ids, targets, padding


class Model(nn.Module):
    tied = True

    def __init__(self, block, vocab, hidden, layers, heads, kv_heads, ffn, seq_len):
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        gpt2 = issubclass(block, Gpt2Block)
        self.positions = nn.Embedding(seq_len, hidden) if gpt2 else None
        self.blocks = nn.ModuleList(block(hidden, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden) if gpt2 else nn.RMSNorm(hidden, eps=1e-5)
        self.head = None if self.tied else nn.Linear(hidden, vocab, bias=False)
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
        head = self.tokens.weight if self.head is None else self.head.weight
        logits = F.linear(self.norm(x), head)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), ids.view(-1))

    def batch(self, rows):
        return (torch.randint(0, self.tokens.num_embeddings, (rows, self.cos.shape[0]), device="cuda"),)


class Untied(Model):
    tied = False


# As megaburn, vocabularies are padded to a multiple of 128.
GPT2 = (Model, Gpt2Block, 50304, 768, 12, 12, 12, 3072, 1024)
LLAMA = (Model, LlamaBlock, 50304, 768, 12, 12, 12, 2048, 1024)
QWEN2 = (Model, Qwen2Block, 151936, 896, 24, 14, 2, 4864, 2048)
GPT_7B = (Untied, Gpt7bBlock, 131200, 4096, 8, 32, 8, 16384, 8192)
BERT_LARGE = (Bert, 30592, 1024, 24, 16, 4096, 512, True)
BERT_FULL = (Bert, 30592, 1024, 24, 16, 4096, 512, False)
T5_LARGE = (T5, 32128, 1024, 24, 16, 2816, (512, 128))
CASES = [
    ("gpt2 16x1", GPT2, 16, 1),
    ("gpt2 1x16", GPT2, 1, 16),
    ("llama 16x1", LLAMA, 16, 1),
    ("llama 1x16", LLAMA, 1, 16),
    ("qwen2 4x1", QWEN2, 4, 1),
    ("qwen2 1x4", QWEN2, 1, 4),
    ("gpt-7b 1x4", GPT_7B, 1, 4),
    ("bert-large 32x1", BERT_LARGE, 32, 1),
    ("bert-full 32x1", BERT_FULL, 32, 1),
    ("t5-large 32x1", T5_LARGE, 32, 1),
]


def measured(name, shape, micro_batch, micro_batches, compiled, steps):
    torch.manual_seed(0)
    torch._dynamo.reset()
    kind, *sizes = shape
    model = kind(*sizes).cuda()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    batch = model.batch(micro_batch)

    def step():
        for _ in range(micro_batches):
            with torch.autocast("cuda", torch.bfloat16):
                loss = forward(*batch) / micro_batches
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
    parser.add_argument("--mode", choices=["eager", "compile"], help="measure only one of both")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    for name, shape, micro_batch, micro_batches in CASES:
        if not name.startswith(args.only):
            continue
        for compiled in {"eager": [False], "compile": [True]}.get(args.mode, [False, True]):
            measured(name, shape, micro_batch, micro_batches, compiled, args.steps)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
