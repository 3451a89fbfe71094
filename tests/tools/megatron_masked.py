"""Makes tests/fixtures/megatron-masked with the data sets of Megatron-Core for BERT and T5.

    pip install torch numpy megatron-core==0.16.1
    python tests/tools/megatron_masked.py

The folder gets
- plain.bin/.idx and odd.bin/.idx: documents of sentences of random tokens. `odd` also has empty documents
  and sentences, documents of one sentence, sentences above 512 tokens, and special tokens in texts
- plain/vocab.txt and odd/vocab.txt: the vocabularies. In `odd` the padding token is not the first one,
  and a token stands on two lines, so that one id has no token
- samples.json: for each case the number of samples, a CRC-32 of the sample index (of a blend: of the pairs
  of data set and sample), a CRC-32 of all fields
  of each sample (int32, little endian, one field after the other), and the first sample in full
- bert-sample_index.npy: the file that Megatron-Core caches for the first case
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
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

OUT = Path(__file__).parent.parent / "fixtures" / "megatron-masked"
PARTS = ["train", "valid", "test"]
SENTINELS = [f"<extra_id_{number}>" for number in range(40)]
SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]", *SENTINELS]
# Each data set: number of documents, most sentences of one, most tokens of a sentence.
SETS = {"plain": (45, 9, 13), "odd": (37, 14, 9)}

# The masking of Megatron-LM's scripts for BERT and for T5, and others.
BERT_MASKING = {"probability": 0.15, "max_ngram": 3, "whole_words": True, "longer_ngrams": False, "geometric": False}
T5_MASKING = BERT_MASKING | {"max_ngram": 10, "geometric": True}
LONGER = BERT_MASKING | {"longer_ngrams": True, "max_ngram": 4, "probability": 0.31}
PIECES = BERT_MASKING | {"whole_words": False, "max_ngram": 1, "probability": 0.2}
GEOMETRIC = BERT_MASKING | {"geometric": True, "max_ngram": 5, "probability": 0.4, "whole_words": False}
LONG = BERT_MASKING | {"max_ngram": 12, "probability": 0.6}

# Data set, seed, sequence length, split, samples asked for of each part, probability of a short sample,
# masking, and whether there are two segments.
BERT = [
    ("plain", 1234, 48, "1", [80, 0, 0], 0.1, BERT_MASKING, True),
    ("plain", 1, 32, "90,6,4", [60, 7, 3], 0.1, BERT_MASKING, True),
    ("plain", 2147483646, 64, "2,1", [31, 20, 0], 0.5, LONGER, True),
    ("plain", 77, 41, "1", [90, 0, 0], 0.0, PIECES, False),
    ("plain", 0, 23, "1", [70, 0, 0], 1.0, GEOMETRIC, True),
    ("odd", 1234, 37, "1", [75, 0, 0], 0.1, BERT_MASKING, True),
    ("odd", 1, 29, "1,1", [40, 33, 0], 0.3, LONG, False),
    ("odd", 987654321, 5, "1", [50, 0, 0], 0.1, BERT_MASKING, True),
    ("odd", 77, 530, "1", [20, 0, 0], 0.1, GEOMETRIC, False),
    ("odd", 5, 19, "3,1,1", [50, 19, 12], 0.7, PIECES, True),
]
# The same, with the length of the decoder's sequence instead of the segments.
T5 = [
    ("plain", 1234, 64, "1", [80, 0, 0], 0.1, T5_MASKING, 20),
    ("plain", 1, 48, "90,6,4", [60, 7, 3], 0.1, T5_MASKING, 16),
    ("plain", 77, 31, "2,1", [31, 20, 0], 0.5, LONGER, 22),
    ("plain", 2147483646, 40, "1", [90, 0, 0], 0.0, PIECES, 24),
    ("odd", 1234, 55, "1", [75, 0, 0], 0.1, T5_MASKING, 30),
    ("odd", 1, 29, "1,1", [40, 33, 0], 0.3, LONG, 37),
    ("odd", 987654321, 4, "1", [50, 0, 0], 0.1, T5_MASKING, 3),
    ("odd", 77, 70, "1", [20, 0, 0], 0.1, GEOMETRIC, 75),
]
# Weights of a blend of both data sets, whose texts are read with the vocabulary of `plain`.
BLENDS = [
    ("plain", 1234, 33, "1", [70, 0, 0], 0.1, BERT_MASKING, True, [0.3, 0.7]),
    ("plain", 5, 40, "1", [90, 0, 0], 0.1, T5_MASKING, 30, [2.0, 1.0]),
]


class Tokenizer:
    """What the data sets ask of a tokenizer."""

    def __init__(self, name):
        lines = (OUT / name / "vocab.txt").read_text().splitlines()
        vocab = {token: id for id, token in enumerate(lines)}
        # Sorted, because megatron-core 0.16.1 draws random tokens in this order, and later versions sort it.
        self.inv_vocab = dict(sorted((id, token) for token, id in vocab.items()))
        self.pad, self.cls, self.sep, self.mask = (vocab[f"[{name}]"] for name in ["PAD", "CLS", "SEP", "MASK"])
        self.bos, self.eos = vocab["[BOS]"], vocab["[EOS]"]
        self.additional_special_tokens_ids = [vocab[token] for token in SENTINELS]
        self.unique_identifiers = {"class": name}


def write_vocabularies():
    draw = numpy.random.default_rng(7)
    words = [f"w{number}" for number in range(70)]
    pieces = [f"##p{number}" for number in range(50)]
    plain = ["[PAD]", *SPECIAL, *words, *pieces]
    odd = [*words[:9], "##", "[PAD]", *SPECIAL, *pieces, "###", *words[9:30]]
    odd = [odd[at] for at in draw.permutation(len(odd))]
    odd.insert(5, odd[40])
    for name, tokens in [("plain", plain), ("odd", odd)]:
        (OUT / name).mkdir()
        (OUT / name / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))


def write_sets():
    for number, (name, (count, most_sentences, most_tokens)) in enumerate(SETS.items()):
        draw = numpy.random.default_rng(31 + number)
        tokenizer = Tokenizer(name)
        is_odd = name == "odd"
        special = {tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask}
        ids = [id for id in tokenizer.inv_vocab if is_odd or id not in special]
        builder = IndexedDatasetBuilder(str(OUT / f"{name}.bin"), dtype=numpy.uint16)
        for document in range(count):
            lengths = draw.integers(1, most_tokens + 1, size=draw.integers(1, most_sentences + 1)).tolist()
            if is_odd and document % 9 == 4:
                lengths = []
            if is_odd and document % 5 == 2:
                lengths = lengths[:1]
            if is_odd and document % 4 == 3:
                lengths[::3] = [0] * len(lengths[::3])
            if is_odd and document == 20:
                lengths[1:2] = [513]
            if is_odd and document in (21, 32):
                lengths = [512, 2, 1] if document == 21 else [600]
            tokens = draw.choice(ids, size=sum(lengths))
            builder.add_document(torch.tensor(tokens, dtype=torch.int64), lengths)
        builder.finalize(str(OUT / f"{name}.idx"))


def config(kind, cache, name, seed, seq_len, split, short, masking, more, weights=None):
    names = [name] if weights is None else list(SETS)
    return kind(
        random_seed=seed,
        sequence_length=seq_len,
        blend=([str(OUT / each) for each in names], weights),
        split=split,
        path_to_cache=cache,
        tokenizer=Tokenizer(name),
        masking_probability=masking["probability"],
        short_sequence_probability=short,
        masking_max_ngram=masking["max_ngram"],
        masking_do_full_word=masking["whole_words"],
        masking_do_permutation=False,
        masking_use_longer_ngrams=masking["longer_ngrams"],
        masking_use_geometric_distribution=masking["geometric"],
        **more,
    )


def fields(dataset, index, pad):
    """The fields of a sample. BERT's types and mask of padding have the id of the padding token, which is
    right only where it is 0; elsewhere both are 0 here."""
    sample = {name: numpy.asarray(value).tolist() for name, value in dataset[index].items()}
    # A blend adds the number of the data set.
    sample.pop("dataset_id", None)
    if "types" in sample:
        assert pad not in (1, -1)
        sample["types"] = [kind if kind != pad else 0 for kind in sample["types"]]
        sample["padding_mask"] = [int(mask == 1) for mask in sample["padding_mask"]]
    return sample


def crc(numbers):
    return zlib.crc32(numpy.array(numbers, dtype="<i4").tobytes())


def cases(kind, table):
    for name, seed, seq_len, split, sizes, short, masking, last, *weights in table:
        cache = tempfile.mkdtemp()
        data_set, config_kind, name_of_last, key = {
            "bert": (BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig, "segments", "classification_head"),
            "t5": (T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig, "decoder_seq_len", "sequence_length_decoder"),
        }[kind]
        built = BlendedMegatronDatasetBuilder(
            data_set, sizes, lambda: True,
            config(config_kind, cache, name, seed, seq_len, split, short, masking, {key: last}, *weights),
        ).build()
        for part, size, dataset in zip(PARTS, sizes, built):
            if dataset is None:
                continue
            samples = [fields(dataset, index, Tokenizer(name).pad) for index in range(len(dataset))]
            index = dataset.sample_index if not weights else numpy.stack(
                [dataset.dataset_index, dataset.dataset_sample_index], axis=1
            )
            if kind == "bert" and not weights and seed == 1234 and name == "plain":
                [path] = Path(cache).glob("*-sample_index.npy")
                shutil.copy(path, OUT / "bert-sample_index.npy")
            flat = lambda sample: numpy.concatenate([numpy.atleast_1d(field) for field in sample.values()])
            yield {
                "set": name, "seed": seed, "seq_len": seq_len, "part": part, "num_samples": size,
                "split": [float(weight) for weight in split.split(",")],
                "short": short, "masking": masking, name_of_last: last,
                "num_rows": len(dataset), "index": crc(index.reshape(-1)), "weights": weights[0] if weights else None,
                "samples": [crc(flat(sample)) for sample in samples], "first": samples[0],
            }


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    write_vocabularies()
    write_sets()
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    bert, t5 = list(cases("bert", BERT)), list(cases("t5", T5))
    blends = [*cases("bert", BLENDS[:1]), *cases("t5", BLENDS[1:])]
    lines = lambda cases: "[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]"
    (OUT / "samples.json").write_text(f'{{"bert": {lines(bert)},\n"t5": {lines(t5)},\n"blends": {lines(blends)}}}\n')
    for each in bert + t5 + blends:
        print(each["set"], each["seed"], each["part"], each["num_rows"])
