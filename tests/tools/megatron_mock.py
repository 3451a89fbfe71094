"""Makes tests/fixtures/megatron-mock.json with the mock documents of Megatron-Core.

    pip install torch numpy megatron-core==0.16.1
    python tests/tools/megatron_mock.py

The file has a CRC-32 of the lengths of all documents, and for some vocabularies the CRC-32 of the
tokens of some documents, all as int32, little endian. Made with megatron-core 0.16.1 and NumPy 2.4.6.
"""

import json
import zlib
from pathlib import Path
from types import SimpleNamespace

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

DOCUMENTS = [0, 1, 5, 7, 77, 4095, 50000, 99998, 99999]


def crc(array):
    return zlib.crc32(array.astype("<i4").tobytes())


def case(vocab_size, eod):
    mock = MockGPTLowLevelDataset(SimpleNamespace(vocab_size=vocab_size, eod=eod))
    documents = [[index, crc(mock[index])] for index in DOCUMENTS]
    return mock, {"vocab_size": vocab_size, "eod": eod, "documents": documents}


if __name__ == "__main__":
    mocks, cases = zip(*[case(*each) for each in [(260, 257), (50257, 50256), (17, 0)]])
    found = {"lengths": crc(mocks[0].sequence_lengths), "cases": cases}
    path = Path(__file__).parent.parent / "fixtures" / "megatron-mock.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
