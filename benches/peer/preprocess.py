"""Measures how fast text becomes Megatron-LM's indexed data sets: its tools/preprocess_data.py and megaburn, alternately.

    pip install torch numpy megatron-core==0.16.1 transformers
    cargo build --release -p megaburn
    python benches/peer/preprocess.py MEGATRON_LM_CLONE --program target/release/megaburn data preprocess

`target/release/examples/preprocess` of megaburn-data is a program that builds faster. The corpus is synthetic: JSON lines
with documents of log-normal lengths, of words that are drawn by Zipf's law, with punctuation, numbers, names, line
breaks and some text that is not ASCII. The tokenizer is a byte-level BPE of 32768 tokens, trained on a part of it; with
`--metaspace` it is a BPE as Llama 2 has it. The files of both programs are compared byte by byte.
"""

import argparse
import filecmp
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path

SEED = 29
ONSETS, VOWELS, CODAS = [*"bcdfghlmnprstvw", ""], [*"aeiou", "ea", "ou"], ["", "", "", *"nrstl"]
OTHER = "naïve café Straße größer déjà Привет мир 今日は 你好 — “quoted” 😀 £5 3.14 x_1 it's we've they'll don't".split()


def words(draw, count):
    """Words of one to four syllables, the short ones first."""
    syllables = [onset + vowel + coda for onset in ONSETS for vowel in VOWELS for coda in CODAS]
    found = set()
    while len(found) < count:
        chosen = draw.integers(len(syllables), size=(count, 4))
        lengths = draw.choice([1, 2, 3, 4], size=count, p=[0.1, 0.4, 0.35, 0.15])
        found.update("".join(syllables[s] for s in four[:length]) for four, length in zip(chosen.tolist(), lengths))
    return sorted(found, key=lambda word: (len(word), word))[:count]


def write_corpus(path, num_bytes):
    import numpy

    draw = numpy.random.default_rng(SEED)
    vocabulary = numpy.array(words(draw, 200_000), dtype=object)
    weights = numpy.cumsum(1 / (numpy.arange(len(vocabulary)) + 2.7) ** 1.05)
    weights /= weights[-1] * (1 + 1e-12)
    written = 0
    with open(path, "w", encoding="utf-8") as lines:
        number = 0
        while written < num_bytes:
            size = int(draw.lognormal(7.7, 0.8))  # bytes: median 2.2 kB, mean 3 kB
            chosen = list(vocabulary[numpy.searchsorted(weights, draw.random(size // 6 + 1))])
            kinds = draw.random(len(chosen)).tolist()
            for place, kind in enumerate(kinds):
                if kind < 0.10:
                    chosen[place] += "," if kind < 0.04 else ".\n\n" if kind < 0.045 else "."
                elif kind < 0.16:
                    chosen[place] = chosen[place].capitalize()
                elif kind < 0.18:
                    chosen[place] = str(int(1 / (kind - 0.16 + 1e-6)))
                elif kind < 0.19:
                    chosen[place] = OTHER[int((kind - 0.18) * 100 * len(OTHER))]
            record = {"id": number, "text": " ".join(chosen), "source": "synthetic"}
            written += lines.write(json.dumps(record, ensure_ascii=number % 4 == 0) + "\n")
            number += 1
    return number


def train_tokenizer(corpus, folder, metaspace):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    folder.mkdir()
    options = {"vocab_size": 32768, "show_progress": False}
    if metaspace:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        bytes_of_fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>", *bytes_of_fallback], **options)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet, **options)
    with open(corpus, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for _, line in zip(range(8000), lines)]
    tokenizer.train_from_iterator(texts, trainer)
    if metaspace:
        # As in the files of Llama 2: no words before the model, so spaces are ordinary symbols. The bytes are no added
        # tokens there.
        tokenizer.pre_tokenizer = None
        prepend = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(prepend)
        content = json.loads(tokenizer.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"][:3] != "<0x"]
        (folder / "tokenizer.json").write_text(json.dumps(content))
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def run(command, env=None):
    start = time.perf_counter()
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    seconds = time.perf_counter() - start
    if ended.returncode != 0:
        sys.exit(f"{command} failed:\n{ended.stdout}\n{ended.stderr}")
    return seconds, ended


def megatron(clone, corpus, folder, prefix, workers):
    command = [sys.executable, __file__, "--run-megatron", str(clone), "--input", str(corpus)]
    command += ["--output-prefix", str(prefix), "--tokenizer-type", "HuggingFaceTokenizer"]
    command += ["--tokenizer-model", str(folder), "--append-eod", "--workers", str(workers)]
    seconds, ended = run(command, {**os.environ, "TOKENIZERS_PARALLELISM": "false"})
    # Without its start-up, by its own clock: "Processed 1000 documents (123.4 docs/s, ..".
    rates = [line for line in ended.stderr.splitlines() if line.startswith("Processed ")]
    return seconds, float(rates[-1].split("(")[1].split()[0])


def megaburn(program, corpus, folder, prefix, workers):
    command = [*program, str(corpus), "--tokenizer", str(folder), "--append-eod", "--workers", str(workers)]
    return run([*command, "--out", str(prefix)])[0]


def remove(prefix):
    for path in prefix.parent.glob(prefix.name + ".*"):
        path.unlink()


def measure(args, folder):
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    num_documents = write_corpus(corpus, args.megabytes << 20)
    train_tokenizer(corpus, tokenizer, args.metaspace)
    size = corpus.stat().st_size / 1e6
    print(f"{num_documents} documents, {size:.1f} MB of JSON lines, {args.workers} workers, load {os.getloadavg()[0]:.2f}\n")
    theirs, ours = folder / "theirs_text_document", folder / "ours"
    found = {"megatron": [], "megatron, own clock": [], "megaburn": []}
    for _ in range(args.rounds):
        remove(theirs)
        remove(ours)
        seconds, rate = megatron(args.clone, corpus, tokenizer, folder / "theirs", args.workers)
        found["megatron"].append(num_documents / seconds)
        found["megatron, own clock"].append(rate)
        seconds = megaburn(args.program, corpus, tokenizer, ours, args.workers)
        found["megaburn"].append(num_documents / seconds)
        for ending in [".bin", ".idx"]:
            if not filecmp.cmp(f"{theirs}{ending}", f"{ours}{ending}", shallow=False):
                sys.exit(f"the {ending} files differ")
    print("| program | documents/s, median | all | MB/s | megaburn / this | by round |")
    print("|---|---:|---|---:|---:|---|")
    for name, rates in found.items():
        median, every = statistics.median(rates), ", ".join(f"{rate:.0f}" for rate in rates)
        ratios = [ours / rate for ours, rate in zip(found["megaburn"], rates)]
        by_round = ", ".join(f"{ratio:.1f}" for ratio in ratios)
        megabytes = median / num_documents * size
        print(f"| {name} | {median:.0f} | {every} | {megabytes:.1f} | {statistics.median(ratios):.1f} | {by_round} |")
    print(f"\nload {os.getloadavg()[0]:.2f} after")
    print(f"\n.bin ({ours.with_suffix('.bin').stat().st_size} bytes) and .idx are equal in all rounds")


def run_megatron(clone, args):
    """Runs the script of the clone, which needs Python 3.12 only for a decorator."""
    import typing_extensions

    typing.override = typing_extensions.override
    sys.path.insert(0, clone)
    sys.argv = ["preprocess_data.py", *args]
    runpy.run_path(str(Path(clone) / "tools" / "preprocess_data.py"), run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run-megatron"]:
        run_megatron(sys.argv[2], sys.argv[3:])
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=lambda path: Path(path).resolve(), help="a clone of Megatron-LM")
    parser.add_argument("--program", nargs="+", default=["target/release/megaburn", "data", "preprocess"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--folder", help="where the temporary files are")
    parser.add_argument("--metaspace", action="store_true", help="a tokenizer as Llama 2 has it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(args, Path(folder))
