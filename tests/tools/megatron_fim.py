"""Makes tests/fixtures/megatron-fim.json with the fill-in-the-middle of Megatron-LM's GPTFIMDataset.

    pip install torch numpy tokenizers megatron-core==0.16.1
    python tests/tools/megatron_fim.py MEGATRON_LM

MEGATRON_LM is a clone of Megatron-LM, whose megatron/training/datasets/fim_dataset.py is read: it is
not part of the wheel. Each case has the tokens of a sample, what was decided at random, in the order
in which it was asked for, and the tokens that came out. The tokenizers are those of
tests/fixtures/tokenizers. Made with Megatron-LM d98e8a64, tokenizers 0.23.3 and NumPy 2.4.6.
"""

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
from tokenizers import Tokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures"
PREFIX, MIDDLE, SUFFIX, SPLIT, PAD = 9001, 9002, 9003, 9004, -1
RATE, SPM_RATE, FRAGMENT_RATE, NO_PREFIX = 0.7, 0.4, 0.6, "#!"
WORDS = ["fn", " main", "()", " {\n", "    let", " größe", " = ", "1.5", ";", "\n}", " 漢字", "\t", "  ", "é", "😀", "#", "!"]


class Draws:
    """What GPTFIMDataset asks of numpy.random.RandomState. All that is drawn is kept."""

    def __init__(self, seed, has_spm):
        self.random = random.Random(seed)
        self.has_spm = has_spm
        self.kept = []

    def binomial(self, count, rate):
        assert count == 1
        happens = self.random.random() < rate and (self.has_spm or rate != SPM_RATE)
        self.kept.append({"rate": rate, "happens": happens})
        return int(happens)

    def randint(self, low, high, size):
        assert (low, size) == (0, 2)
        places = [self.random.randrange(high) for _ in range(size)]
        self.kept.append({"len": high - 1, "boundaries": sorted(places)})
        return numpy.array(places)


class Text:
    """What GPTFIMDataset asks of a tokenizer."""

    def __init__(self, name):
        self.tokenizer = Tokenizer.from_file(str(FIXTURES / "tokenizers" / name / "tokenizer.json"))
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def ids_to_text(self, ids, remove_special_tokens):
        return self.tokenizer.decode([int(id) for id in ids], skip_special_tokens=remove_special_tokens)

    def text_to_ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def document(draw, text):
    """A text that is not empty, as ids."""
    words = [draw.choice(WORDS) for _ in range(draw.randrange(1, 20))]
    start = NO_PREFIX if draw.random() < 0.3 else "x"
    return text.text_to_ids(start + "".join(words))


def case(dataset, name, eos, seed, split, no_prefix):
    draw = random.Random(seed)
    text = Text(name)
    sample = []
    for number in range(draw.randrange(1, 6)):
        sample += [eos] if number else []
        for fragment in range(draw.choice([1, 1, 2, 4])):
            sample += [SPLIT] if split and fragment else []
            sample += document(draw, text)
    draws = Draws(seed, name != "llama2")
    dataset = object.__new__(dataset)
    dataset.__dict__.update(
        np_rng=draws,
        fim_rate=RATE,
        fim_spm_rate=SPM_RATE,
        fragment_fim_rate=FRAGMENT_RATE,
        fim_split_sample=SPLIT if split else None,
        no_fim_prefix=NO_PREFIX if no_prefix else None,
        prefix_tok_id=PREFIX,
        middle_tok_id=MIDDLE,
        suffix_tok_id=SUFFIX,
        pad_tok_id=PAD,
        eod_tok_id=eos,
        config=SimpleNamespace(tokenizer=SimpleNamespace(_tokenizer=text)),
        shuffle_index=[0],
        document_index=[0],
        sample_index=[(0, 0), (0, len(sample) - 1)],
        dataset=SimpleNamespace(get=lambda index, offset, length: numpy.array(sample)[offset : offset + length]),
    )
    tokens, _, _ = dataset._query_document_sample_shuffle_indices(0)
    return {
        "tokenizer": name,
        "split_token": SPLIT if split else None,
        "no_prefix": NO_PREFIX if no_prefix else None,
        "sample": sample,
        "decisions": draws.kept,
        "expected": [token for token in tokens.tolist() if token != PAD],
    }


if __name__ == "__main__":
    path = Path(sys.argv[1]) / "megatron/training/datasets/fim_dataset.py"
    spec = importlib.util.spec_from_file_location("fim_dataset", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases = []
    # The eos of each tokenizer, as its files say.
    for name, eos in [("byte-level", "<|endoftext|>"), ("llama3", "</s>"), ("llama2", "</s>")]:
        id = Text(name).tokenizer.token_to_id(eos)
        for seed in range(24):
            cases.append(case(module.GPTFIMDataset, name, id, seed, seed % 2 == 1, seed % 4 > 1))
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    constants = {
        "prefix": PREFIX, "middle": MIDDLE, "suffix": SUFFIX,
        "rate": RATE, "spm_rate": SPM_RATE, "fragment_rate": FRAGMENT_RATE,
    }
    (FIXTURES / "megatron-fim.json").write_text(f'{{"settings": {json.dumps(constants)},\n"cases": [\n{lines}\n]}}\n')
    print(len(cases), "cases")
