"""Makes the tokenizers in tests/fixtures/tokenizers and what Python's `tokenizers` does with them.

    python tests/tools/hf_tokenizers.py [--check FOLDER]

Each folder holds a tokenizer.json, the files that name its special tokens, and expected.json: for
tricky strings the ids with special tokens taken for text (`plain`), recognised and added as the template
says (`prompt`), and
the text that `prompt` decodes to without special tokens. With --check, a folder that `megaburn
tokenize` wrote is loaded with transformers and its ids are printed, one JSON line a string.
Made with tokenizers 0.23.3 and transformers 5.23.0.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors, trainers

OUT = Path(__file__).parent.parent / "fixtures" / "tokenizers"

SENTENCES = """
The river does not ask where it is going; it goes. Old boats lie on its banks, green with moss.
"Who," said the miller, "would pay 1250 crowns for 3 sacks of rye?" Nobody answered him.
In the evening they sat by the fire, and the youngest told of cities, trains and lighted windows.
fn main() {\n    let total: usize = (0..100).map(|x| x * x).sum();\n    println!("{total}");\n}
Le garçon à la fenêtre rêvait déjà d'été; die Straße war naß, größer als früher.
Привет, мир! Как дела? Всё хорошо, спасибо. 今日は良い天気です。你好，世界。 שלום עולם
It's what we've got, isn't it? They'll say I'm wrong; you'd better not. WE'RE LOUD.
""".strip().split("\n")

STRINGS = [
    "",
    " ",
    "  ",
    "\n",
    "Hello, world!",
    " Hello",
    "   three spaces before",
    "three after   ",
    "in   between \t tabs\t\t",
    "line\nbreaks\r\n\r\n\n and more\n",
    "It's they'll WE'RE you'd",
    "12345 3.14159 1e-9",
    "naïve café Straße größer",
    "e\u0301 combining, \u00e9 composed",
    "Привет, мир! 今日は 你好 שלום",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f3fd end",
    "\u200b\ufeff\u00a0|\u3000",
    "\u2581already a metaspace\u2581",
    "\x00\x01\x7f control",
    "zero \ufffd replacement",
    "a </s> b<|endoftext|>c <s>d<unk>",
    "</s>",
    "<|endoftext|><|endoftext|>",
    " <|tool|> not special",
    "<0x41> spelled byte",
    "fn f(x: &str) -> Vec<u8> {\n        x.bytes().rev().collect()\n    }",
    "a" * 40,
]


def byte_level():
    """GPT-2's make: bytes as tokens, the split in its pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken("<|tool|>", normalized=False)])
    return tokenizer, {"tokenizer_config.json": {"eos_token": "<|endoftext|>", "pad_token": None}}


def llama3():
    """Llama 3's make: its own split, whole words looked up first, a start token added by default."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|endoftext|>", "</s>"])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    tokenizer.enable_truncation(4)
    files = {
        "special_tokens_map.json": {"bos_token": {"content": "<|begin_of_text|>", "lstrip": False}},
        "generation_config.json": {"eos_token_id": [tokenizer.token_to_id("</s>"), bos]},
    }
    return tokenizer, files


def sentencepiece(metaspace):
    """Llama 2's and Mistral's make: spaces as U+2581, characters without a token as bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    special = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=560, limit_alphabet=70, show_progress=False)
    trained.train_from_iterator(SENTENCES, trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    vocab = {token: id for id, token in enumerate(special + fallback + pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def llama2():
    return sentencepiece(metaspace=False), {"config.json": {"bos_token_id": 1, "eos_token_id": 2}}


def mistral():
    names = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    return sentencepiece(metaspace=True), {"tokenizer_config.json": names}


def unigram():
    """T5's make: the pieces of the best score, special tokens among them; a decoder by token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer, {"special_tokens_map.json": {"pad_token": "<pad>"}}


def write(name, tokenizer, files):
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    for file, value in files.items():
        (folder / file).write_text(json.dumps(value, indent=1) + "\n")
    tokenizer.no_truncation()
    cases = []
    for text in STRINGS:
        tokenizer.encode_special_tokens = True
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = False
        prompt = tokenizer.encode(text).ids
        decoded = tokenizer.decode(prompt, skip_special_tokens=True)
        plain_decoded = tokenizer.decode(plain, skip_special_tokens=True)
        case = {"text": text, "plain": plain, "plain_decoded": plain_decoded}
        cases.append(case | {"prompt": prompt, "prompt_decoded": decoded})
    lines = ",\n".join(json.dumps(case) for case in cases)
    (folder / "expected.json").write_text(f"[\n{lines}\n]\n")
    print(name, tokenizer.get_vocab_size(), (folder / "tokenizer.json").stat().st_size, "bytes")


def check(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = {"class": type(tokenizer).__name__, "bos": tokenizer.bos_token}
    names |= {"eos": tokenizer.eos_token, "pad": tokenizer.pad_token, "len": len(tokenizer)}
    print(json.dumps(names), file=sys.stderr)
    for text in STRINGS:
        ids = tokenizer(text)["input_ids"]
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        print(json.dumps({"text": text, "prompt": ids, "prompt_decoded": decoded}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(sys.argv[2])
    else:
        for make in [byte_level, llama3, llama2, mistral, unigram]:
            write(make.__name__.replace("_", "-"), *make())
