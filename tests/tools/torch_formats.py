"""Makes tests/fixtures/torch with PyTorch, and checks with it what megaburn-torch writes.

    pip install torch==2.11 numpy megatron-core==0.16.1
    python tests/tools/torch_formats.py make

The folder gets pickles of all protocols (pickles/).
Made with Python 3.11, torch 2.11 and megatron-core 0.16.1.
"""

import collections
import pickle
import shutil
import sys
from pathlib import Path

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


def make():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    make_pickles()


if __name__ == "__main__":
    {"make": make}[sys.argv[1]](*sys.argv[2:])
