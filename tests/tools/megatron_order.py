"""Makes tests/fixtures/megatron-order with NumPy and Megatron-Core's own data set classes.

    pip install torch numpy megatron-core==0.16.1
    python tests/tools/megatron_order.py

The folder gets
- a.bin/.idx to e.bin/.idx: data sets of random tokens, written by IndexedDatasetBuilder
- numpy.json: shuffles and bounded numbers of RandomState, and sums of weights
- order.json: for each case the indices and a CRC-32 of each sample's tokens (int32, little endian)
- KEY-*.npy: the files that Megatron-Core caches for one case of each class
Made with megatron-core 0.16.1 and NumPy 2.4.6 on x86-64.
"""

import json
import shutil
import tempfile
import zlib
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import normalize

OUT = Path(__file__).parent.parent / "fixtures" / "megatron-order"
PARTS = ["train", "valid", "test"]
# Each data set: number of documents, most tokens of one, type of tokens, size of the vocabulary.
SETS = {
    "a": (90, 40, numpy.uint16, 1000),
    "b": (37, 23, numpy.uint16, 1000),
    "c": (700, 7, numpy.int32, 1000),
    "d": (11, 90, numpy.uint8, 200),
    "e": (61, 17, numpy.int32, 1000),
}

# Data set, seed, sequence length, split, samples asked for of each part.
GPT = [
    ("a", 1, 16, "90,6,4", [200, 10, 1]),
    ("a", 1234, 16, "9,1", [230, 3, 0]),
    ("a", 4294967295, 31, "90,6,4", [None, None, None]),
    ("b", 1, 8, "1", [90, 0, 0]),
    # An epoch has 75 samples: 59 and 60 of the last one are needed, below 80% and not.
    ("b", 1, 8, "1", [134, 0, 0]),
    ("b", 1, 8, "1", [135, 0, 0]),
    ("b", 77, 5, "0.5,0.25,0.25", [85, 31, 9]),
    ("b", 1234, 64, "50,50", [13, 20, 0]),
    ("c", 1, 12, "969,30,1", [380, 19, 1]),
    ("c", 1234, 7, "8,1,1", [431, 60, 81]),
    ("d", 77, 11, "1,1,1", [37, 50, 44]),
    ("d", 1234, 200, "1", [7, 0, 0]),
    ("e", 0, 7, "98,2", [131, 4, 0]),
    ("e", 77, 9, "0,1", [0, 101, 0]),
]

# Data sets, weights, seed, sequence length, split, samples asked for of each part.
BLENDS = [
    ("ab", [0.3, 0.7], 1, 16, "90,6,4", [150, 20, 10]),
    ("abc", [30, 60, 10], 1234, 12, "80,10,10", [211, 23, 7]),
    ("abcde", None, 77, 9, "80,20", [170, 1000, 0]),
    ("edc", None, 1234, 7, "2,1,1", [None, None, None]),
    ("a", [3.0], 1, 16, "1", [220, 0, 0]),
    ("abcdeabcdeab", [0.1 * n + 0.03 for n in range(12)], 77, 6, "1", [333, 0, 0]),
    ("ba", [1e-3, 1.0], 1234, 8, "1", [97, 0, 0]),
]


class Tokenizer:
    """What GPTDataset asks of a tokenizer."""

    pad = -1
    eod = 999
    vocab_size = 1000
    unique_identifiers = {"class": "Tokenizer"}


def write_sets():
    for number, (name, (count, most, dtype, vocab)) in enumerate(SETS.items()):
        draw = numpy.random.default_rng(29 + number)
        builder = IndexedDatasetBuilder(str(OUT / f"{name}.bin"), dtype=dtype)
        for document in range(count):
            size = int(draw.integers(1, most + 1))
            if document % 9 == 4:
                size = 0
            if document in (2, count - 1):
                size = 5 * most
            tokens = torch.tensor(draw.integers(0, vocab, size=size), dtype=torch.int64)
            # Some documents are of several sequences, which is what Megatron-LM divides and shuffles.
            lengths = [size // 3, size - size // 3] if document % 7 == 3 else [size]
            builder.add_document(tokens, lengths)
        builder.finalize(str(OUT / f"{name}.idx"))


def config(cache, prefixes, weights, seed, seq_len, split):
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=([str(OUT / name) for name in prefixes], weights),
        split=split,
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


def sums(dataset):
    """A CRC-32 of the tokens of each sample."""
    found = []
    for index in range(len(dataset)):
        sample = dataset[index]
        tokens = numpy.append(sample["tokens"].numpy(), sample["labels"].numpy()[-1])
        found.append(zlib.crc32(tokens.astype("<i4").tobytes()))
    return found


def gpt_case(cache, name, seed, seq_len, split, sizes):
    built = BlendedMegatronDatasetBuilder(
        GPTDataset, sizes, lambda: True, config(cache, [name], None, seed, seq_len, split)
    ).build()
    for part, size, dataset in zip(PARTS, sizes, built):
        if dataset is None:
            continue
        indices = [dataset.document_index, dataset.sample_index, dataset.shuffle_index]
        yield {
            "set": name, "seed": seed, "seq_len": seq_len, "part": part, "num_samples": size,
            "split": [float(weight) for weight in split.split(",")],
            "key": dataset.unique_description_hash,
            "document_index": indices[0].tolist(),
            "sample_index": indices[1].reshape(-1).tolist(),
            "shuffle_index": indices[2].tolist(),
            "tokens": sums(dataset),
        }


def blend_case(cache, names, weights, seed, seq_len, split, sizes):
    built = BlendedMegatronDatasetBuilder(
        GPTDataset, sizes, lambda: True, config(cache, names, weights, seed, seq_len, split)
    ).build()
    for part, size, dataset in zip(PARTS, sizes, built):
        if dataset is None:
            continue
        yield {
            "sets": list(names), "weights": weights, "seed": seed, "seq_len": seq_len, "part": part,
            "num_samples": size, "split": [float(weight) for weight in split.split(",")],
            "key": dataset.unique_description_hash,
            "asked": [source.num_samples for source in dataset.datasets],
            "dataset_index": dataset.dataset_index.tolist(),
            "dataset_sample_index": dataset.dataset_sample_index.tolist(),
            "tokens": sums(dataset),
        }


def numpy_values():
    shuffles = []
    for seed, kind, sizes in [
        (0, "int32", [1, 2, 3, 100]),
        (1234, "uint32", [257, 256, 1, 255]),
        (2**32 - 1, "int64", [33, 700]),
        (77, "int16", [0, 65, 64]),
    ]:
        state = numpy.random.RandomState(seed)
        arrays = [numpy.arange(size, dtype=kind) for size in sizes]
        for array in arrays:
            state.shuffle(array)
        shuffles.append({"seed": seed, "arrays": [array.tolist() for array in arrays]})
    # The legacy generator draws bounded numbers by masked rejection, as its shuffle does.
    bounded = []
    for seed, most in [(5, 2**32 - 2), (6, 2**32), (7, 2**40 + 12344), (8, 2**62 + 1)]:
        drawn = numpy.random.RandomState(seed).randint(0, most + 1, size=40, dtype=numpy.int64)
        bounded.append({"seed": seed, "most": most, "drawn": drawn.tolist()})
    draw = numpy.random.default_rng(3)
    weights = [draw.random(count) * 10.0 ** draw.integers(-3, 4) for count in [1, 2, 7, 8, 9, 31, 128, 129, 300]]
    normalized = [{"weights": each.tolist(), "normalized": normalize(each.tolist())} for each in weights]
    return {"shuffles": shuffles, "bounded": bounded, "normalized": normalized}


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    write_sets()
    cache = tempfile.mkdtemp()
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    gpt = [case for arguments in GPT for case in gpt_case(cache, *arguments)]
    blends = [case for arguments in BLENDS for case in blend_case(cache, *arguments)]
    for case, endings in [
        (gpt[0], ["document_index", "sample_index", "shuffle_index"]),
        (blends[0], ["dataset_index", "dataset_sample_index"]),
    ]:
        for ending in endings:
            [path] = Path(cache).glob(f"{case['key']}-*-train-{ending}.npy")
            shutil.copy(path, OUT / f"{case['set'] if 'set' in case else ''.join(case['sets'])}-{ending}.npy")
    for case in gpt + blends:
        del case["key"]
    lines = lambda cases: "[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]"
    (OUT / "order.json").write_text(f'{{"gpt": {lines(gpt)},\n"blends": {lines(blends)}}}\n')
    (OUT / "numpy.json").write_text(json.dumps(numpy_values(), separators=(",", ":")) + "\n")
    print(len(gpt), "cases of GPTDataset,", len(blends), "of BlendedDataset")
