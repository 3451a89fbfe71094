"""Writes `tests/fixtures/torch/module.pt`: the state dict of a small module, for tests of `megaburn-records`.

    python tests/tools/torch_module.py tests/fixtures/torch/module.pt

Element `i` of tensor `k`, in the order of the state dict, is `((7 i + 13 k) mod 101) / 50 - 1`.
"""

import sys

import torch
from torch import nn


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)


module = Module()
with torch.no_grad():
    for k, tensor in enumerate(module.state_dict().values()):
        values = torch.arange(tensor.numel()) * 7 + 13 * k
        tensor.copy_(((values % 101) / 50 - 1).reshape(tensor.shape))
torch.save(module.state_dict(), sys.argv[1])
