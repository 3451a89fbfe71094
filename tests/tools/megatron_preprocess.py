"""Makes tests/fixtures/megatron-preprocess with Megatron-LM's own tools/preprocess_data.py.

    pip install torch numpy megatron-core==0.16.1 transformers
    python tests/tools/megatron_preprocess.py MEGATRON_LM_CLONE

The folder gets corpus.jsonl and, for each tokenizer of tests/fixtures/tokenizers that is named below,
TOKENIZER_KEY_document.bin and .idx (with --append-eod), and TOKENIZER-plain_text_document.bin and .idx
(without), as the script writes them.
Made with Megatron-LM d98e8a64, torch 2.11 and transformers 5.
"""

import json
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
import typing
from pathlib import Path

import typing_extensions

# Megatron-LM needs Python 3.12 only for this decorator.
typing.override = typing_extensions.override

TESTS = Path(__file__).parent.parent
OUT = TESTS / "fixtures" / "megatron-preprocess"
# Each with the token that ends a text, which transformers reads only from a file next to it.
TOKENIZERS = {"byte-level": "<|endoftext|>", "llama3": "</s>", "llama2": "</s>", "unigram": "</s>"}
KEYS = ["text", "title", "parts"]
WORDS = """river boats moss 1250 crowns Straße größer été déjà Привет мир 今日は 你好 שלום it's we've
fn main() { let x = 3; } \n\n \t 😀 👩‍👩‍👧 ﬁ naïve e\u0301 \u00a0 \u2581 \x00 <0x41> 3.14159""".split(" ")


def corpus(path):
    draw = random.Random(29)
    text = lambda most: " ".join(draw.choice(WORDS) for _ in range(draw.randrange(most)))
    with open(path, "w", encoding="utf-8") as lines:
        for number in range(60):
            record = {
                "id": number,
                "text": text(120) if number % 7 else "",
                "title": text(6),
                "parts": [text(9) for _ in range(draw.randrange(4))],
            }
            lines.write(json.dumps(record, ensure_ascii=bool(number % 2)) + "\n")


def preprocess(prefix, tokenizer, *more):
    folder = Path(tempfile.mkdtemp())
    shutil.copy(TESTS / "fixtures" / "tokenizers" / tokenizer / "tokenizer.json", folder)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TOKENIZERS[tokenizer]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    # Each run has a process of its own, because the script forks.
    command = [sys.executable, __file__, sys.argv[1], "--input", str(OUT / "corpus.jsonl")]
    command += ["--output-prefix", str(OUT / prefix), "--tokenizer-type", "HuggingFaceTokenizer"]
    command += ["--tokenizer-model", str(folder), "--workers", "1", *more]
    subprocess.run(command, check=True, timeout=120)


def tool(clone):
    sys.path.insert(0, str(clone))
    sys.argv = sys.argv[1:]
    runpy.run_path(str(clone / "tools" / "preprocess_data.py"), run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        tool(Path(sys.argv[1]).resolve())
        sys.exit()
    OUT.mkdir(exist_ok=True)
    corpus(OUT / "corpus.jsonl")
    for tokenizer in TOKENIZERS:
        preprocess(tokenizer, tokenizer, "--append-eod", "--json-keys", *KEYS)
        preprocess(tokenizer + "-plain", tokenizer)
