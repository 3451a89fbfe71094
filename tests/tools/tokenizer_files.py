"""Makes tokenizers in the file formats of SentencePiece, tiktoken and BERT, and expected hashes of ids.

    python tests/tools/tokenizer_files.py [--full FOLDER] [NAME ..]

Writes tests/fixtures/tokenizer-files: `strings.json` with strings of 30 scripts, and a folder a tokenizer
with its files and `expected.txt`, one line a string: hashes of the ids as training text, of the
ids as a prompt, and of the text that the former decode to, or `-`. With --full, it writes 2,000 strings a script
and larger tokenizers into FOLDER, which the ignored test of `tests/tokenizers/files.rs` compares.
Made with sentencepiece 0.2.3, tiktoken 0.14.0, tokenizers 0.23.3 and transformers 5.24.0.
"""

import base64
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

OUT = Path(__file__).parent.parent / "fixtures" / "tokenizer-files"

SCRIPTS = {
    "latin": [(0x41, 0x5A), (0x61, 0x7A)],
    "latin extended": [(0xC0, 0x24F), (0x1E00, 0x1EFF)],
    "greek": [(0x391, 0x3C9), (0x1F00, 0x1F15)],
    "cyrillic": [(0x400, 0x45F)],
    "armenian": [(0x531, 0x556), (0x561, 0x587)],
    "hebrew": [(0x5D0, 0x5EA), (0x5B0, 0x5C2)],
    "arabic": [(0x620, 0x64A), (0x64B, 0x655), (0xFE70, 0xFEFC)],
    "syriac": [(0x710, 0x74A)],
    "devanagari": [(0x904, 0x94D)],
    "bengali": [(0x985, 0x9B9), (0x9BE, 0x9CD)],
    "gurmukhi": [(0xA05, 0xA39), (0xA3E, 0xA4D)],
    "gujarati": [(0xA85, 0xAB9), (0xABE, 0xACD)],
    "tamil": [(0xB85, 0xBB9), (0xBBE, 0xBCD)],
    "telugu": [(0xC05, 0xC39), (0xC3E, 0xC4D)],
    "kannada": [(0xC85, 0xCB9), (0xCBE, 0xCCD)],
    "malayalam": [(0xD05, 0xD39), (0xD3E, 0xD4D)],
    "sinhala": [(0xD85, 0xDC6), (0xDCA, 0xDDF)],
    "thai": [(0xE01, 0xE3A), (0xE40, 0xE4E)],
    "lao": [(0xE81, 0xEB9), (0xEC0, 0xECD)],
    "tibetan": [(0xF40, 0xF6C), (0xF71, 0xF84)],
    "myanmar": [(0x1000, 0x103E)],
    "georgian": [(0x10D0, 0x10FA), (0x10A0, 0x10C5)],
    "hangul": [(0xAC00, 0xD7A3), (0x1100, 0x11FF)],
    "ethiopic": [(0x1200, 0x135A)],
    "cherokee": [(0x13A0, 0x13F4), (0xAB70, 0xABBF)],
    "khmer": [(0x1780, 0x17D3)],
    "mongolian": [(0x1820, 0x1878)],
    "kana": [(0x3041, 0x3096), (0x30A1, 0x30FA), (0xFF66, 0xFF9D)],
    "han": [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0xF900, 0xFA6D)],
    "gothic": [(0x10330, 0x1034A), (0x10400, 0x1044F)],
}
ODD = [
    ["\x00", "\x01", "\x0b", "\x1b", "\x7f", "\x85", "\xad", "\u200b", "\u200d", "\ufeff", "\ufffd", "\ufffe"],
    ["\r\n", "\n", "\r", "\n\n", "\t", "  ", "   ", " \n ", "\u00a0", "\u3000", "\u2028", "\u2003"],
    ["\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f3fd", "\u2764\ufe0f", "\U0001f1e9\U0001f1ea"],
    ["\u0301", "\u0308\u0323", "a\u0301\u0302\u0303", "e\u0301", "\u1e9b\u0323", "\u0344", "\u20dd"],
    ["\ue000", "\uf8ff", "\U000f0000", "\U0010fffd", "\u0378", "\U0001fffe"],
    ["\uff21\uff22", "\ufb01", "\u2460", "\u00bd", "\u2167", "\u337f", "\u01c5", "\u0130", "\u00df", "\u03a3", "\uac00"],
    ["\u2581", "\u2581\u2581", " \u2581", "\u2581 a", "<0x41>", "##a", "<s>", "</s>", "<unk>", "<|endoftext|>", "[SEP]"],
    ["<tool>", "<tool><call>", " <call> ", "<toolbox>", "[UNK]", "<pad>", "<|im_end|>", "<ctl>", "<extra_id_0>"],
    ["'s", "'LL", "don't", "I'VE", "12345", "3.14", "1e-9", "\u0661\u0662\u0663\u0664", "...", "!?", "--", "$5", "\u201c", "\u3002"],
]
WORDS = """the river does not ask where it is going old boats lie on its banks green with moss who said miller would
pay crowns for three sacks of rye nobody answered him in evening they sat by fire and youngest told cities trains
lighted windows lower lowest new newer newest""".split()
SENTENCES = """
The river does not ask where it is going; it goes. Old boats lie on its banks, green with moss.
"Who," said the miller, "would pay 1250 crowns for 3 sacks of rye?" Nobody answered him.
In the evening they sat by the fire, and the youngest told of cities, trains and lighted windows.
Le garçon à la fenêtre rêvait déjà d'été; die Straße war naß, größer als früher. naïve café
Привет, мир! Как дела? Всё хорошо, спасибо. 今日は良い天気です。你好，世界。 שלום עולם 안녕하세요
It's what we've got, isn't it? They'll say I'm wrong; you'd better not. WE'RE LOUD.
""".strip().split("\n")


def word(rng, ranges):
    first, last = rng.choice(ranges)
    return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 7)))


def string(rng, ranges):
    parts = []
    for _ in range(rng.choice([0, 1, 2, 4, 8])):
        kind = rng.random()
        if kind < 0.45:
            parts.append(word(rng, ranges))
        elif kind < 0.6:
            parts.append(rng.choice(WORDS))
        elif kind < 0.65:
            parts.append(word(rng, rng.choice(list(SCRIPTS.values()))))
        else:
            parts.append(rng.choice(rng.choice(ODD)))
        if rng.random() < 0.5:
            parts.append(" ")
    return "".join(parts)


def strings(per_script):
    """Pairs of a text and how often it is repeated. One string in 50 is a very long line."""
    rng = random.Random(29)
    made = []
    for ranges in SCRIPTS.values():
        for index in range(per_script):
            long = index % 50 == 7 or (per_script < 50 and index == 7)
            made.append([string(rng, ranges), rng.randint(20, 400) if long else 1])
    return made


def fnv(data):
    hash = 0x811C9DC5
    for byte in data:
        hash = (hash ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{hash:08x}"


def hash_ids(ids):
    return fnv(b"".join(id.to_bytes(4, "little") for id in ids))


def corpus(full):
    rng = random.Random(7)
    lines = list(SENTENCES) * 4
    for ranges in SCRIPTS.values():
        lines += [" ".join(word(rng, ranges) for _ in range(6)) for _ in range(40 if full else 0)]
    lines += [" ".join(rng.choice(WORDS) for _ in range(9)) for _ in range(400)]
    return lines


RULES = {
    "\uff21": "A", "\uff22": "B", "\ufb01": "fi", "\u2460": "1", "\u00bd": "1/2", "e\u0301": "\u00e9", "\t": " ",
    "\n": " ", "\r": " ", "\u3000": " ", "\u00a0": " ", "\u200b": "", "\x01": "", "a\u0301\u0302": "x  y", "\u00df": "ss",
    "\u0308\u0323": "\u0323\u0308", "\x7f": " z ", "\u2764\ufe0f": "\u2764", "\u1e9b\u0323": "s",
}  # fmt: skip


def rule_file(folder):
    path = Path(folder) / "rules.tsv"
    hexes = lambda text: " ".join(f"{ord(c):X}" for c in text)
    path.write_text("".join(f"{hexes(a)}\t{hexes(b)}\n" for a, b in RULES.items()))
    return path


# The arguments of the trainer, the files beside, and whether its normalizer is the small one in the fixtures.
SENTENCEPIECE = {
    "sp-unigram": (
        dict(model_type="unigram", user_defined_symbols=["<tool>", "<call>", "3.14"], control_symbols=["<ctl>"]),
        {},
        True,
    ),
    "sp-unigram-bytes": (
        dict(model_type="unigram", byte_fallback=True, pad_id=3, split_by_whitespace=False),
        {"tokenizer_config.json": {"add_bos_token": True, "add_eos_token": True}},
        True,
    ),
    "sp-bpe-llama": (
        dict(
            model_type="bpe", byte_fallback=True, normalization_rule_name="identity", split_digits=True,
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, user_defined_symbols=["<tool>", "  "],
        ),
        {"tokenizer_config.json": {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>", "legacy": False}},
        False,
    ),
    "sp-bpe-suffix": (
        dict(model_type="bpe", treat_whitespace_as_suffix=True, user_defined_symbols=["<tool>", "<toolbox"]),
        {},
        True,
    ),
    "sp-bpe-no-prefix": (
        dict(model_type="bpe", add_dummy_prefix=False, byte_fallback=True, bos_id=2, eos_id=1, pad_id=0, unk_id=3),
        {
            "generation_config.json": {"bos_token_id": 2, "eos_token_id": 1},
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    "5000": {"content": "<|im_end|>", "special": True, "normalized": False},
                    "5001": {"content": "##a", "special": False, "rstrip": True},
                }
            },
            "added_tokens.json": {"<toolbox>": 5003},
        },
        True,
    ),
}  # fmt: skip


def train_sentencepiece(args, rules, path, full):
    import sentencepiece

    args = dict(args)
    with tempfile.TemporaryDirectory() as scratch:
        if rules and full:
            args["normalization_rule_name"] = "nmt_nfkc_cf" if args["model_type"] == "bpe" else "nmt_nfkc"
        elif rules:
            args["normalization_rule_tsv"] = str(rule_file(scratch))
        prefix = Path(scratch) / "m"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus(full)), model_prefix=str(prefix), hard_vocab_limit=False, minloglevel=2,
            vocab_size=4000 if full else 640, character_coverage=0.98, num_threads=1, **args,
        )  # fmt: skip
        shutil.copy(f"{prefix}.model", path)


def sentencepiece(name, folder, full):
    import sentencepiece
    import sentencepiece.sentencepiece_model_pb2

    args, files, rules = SENTENCEPIECE[name]
    train_sentencepiece(args, rules, folder / "tokenizer.model", full)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    bare = Path(tempfile.mkdtemp()) / "bare.model"
    proto = sentencepiece.sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((folder / "tokenizer.model").read_bytes())
    proto.normalizer_spec.add_dummy_prefix = False
    bare.write_bytes(proto.SerializeToString())
    bare = sentencepiece.SentencePieceProcessor(model_file=str(bare))
    config = files.get("tokenizer_config.json", {})
    later = bare if config.get("legacy") is False else processor
    words = {token["content"]: (int(id), token) for id, token in config.get("added_tokens_decoder", {}).items()}
    words |= {word: (id, {"special": False}) for word, id in files.get("added_tokens.json", {}).items()}
    added = {word: (id, token) for word, (id, token) in words.items() if not token["special"]}
    pieces = [(id, proto.pieces[id]) for id in range(len(proto.pieces))]
    special = {piece.piece: (id, {"special": True}) for id, piece in pieces if piece.type in [2, 3]}
    names = {id: word for word, (id, _) in words.items()}
    bos, eos = processor.bos_id(), processor.eos_id()

    def compose(text, tokens):
        """Divides a text at the tokens; SentencePiece encodes the parts."""
        ids, at, part = [], 0, ""
        encode = lambda part: (later if at > len(part) else processor).encode(part)
        while at < len(text):
            found = max((word for word in tokens if text.startswith(word, at)), key=len, default=None)
            if found is None:
                part += text[at]
                at += 1
                continue
            id, token = tokens[found]
            ids += encode(part) + [id]
            part = ""
            at += len(found)
            while token.get("rstrip") and at < len(text) and text[at].isspace():
                at += 1
        return ids + encode(part)

    def expected(text):
        plain = compose(text, added) if added else processor.encode(text)
        prompt = compose(text, special | words)
        if config.get("add_bos_token"):
            prompt = [bos] + prompt
        if config.get("add_eos_token"):
            prompt = prompt + [eos]
        spelled = [names.get(id) or processor.id_to_piece(id) for id in plain if id != processor.unk_id()]
        return plain, prompt, processor.decode_pieces(spelled)

    return files, expected


# The additional arguments of the trainer, tokenizer_config.json, and the model; all as published for T5 and mT5.
SENTINELS = [f"<extra_id_{index}>" for index in range(5)]
NAMED = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
T5 = {
    "sp-t5": ({}, NAMED | {"extra_ids": 5, "additional_special_tokens": SENTINELS}, None),
    "sp-t5-usual": ({}, NAMED | {"legacy": False, "additional_special_tokens": ["<tool>", *SENTINELS]}, "t5"),
    "sp-mt5": (
        {"user_defined_symbols": [f"\u2581{sentinel}" for sentinel in reversed(SENTINELS)]},
        NAMED | {"extra_ids": 0, "additional_special_tokens": None, "tokenizer_class": "T5Tokenizer"},
        "mt5",
    ),
}


def t5(name, folder, full):
    """Prompts of transformers' T5Tokenizer for a SentencePiece model, and SentencePiece's ids of plain text."""
    import sentencepiece
    from transformers import AutoTokenizer

    args, config, model = T5[name]
    args = dict(model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1) | args
    train_sentencepiece(args, True, folder / "spiece.model", full)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    files = {"tokenizer_config.json": config}
    if model:
        files["config.json"] = {"model_type": model}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        shutil.copy(folder / "spiece.model", scratch)
        for file, value in ({"config.json": {"model_type": "t5"}} | files).items():
            (scratch / file).write_text(json.dumps(value))
        tokenizer = AutoTokenizer.from_pretrained(scratch)
    ids = {name: id for name, id in tokenizer.get_vocab().items() if "<extra_id_" in name or name == "<tool>"}
    (folder / "ids.json").write_text(json.dumps(ids, indent=1, sort_keys=True) + "\n")

    def expected(text):
        plain = processor.encode(text)
        # Transformers divides a text at all kinds of spaces before SentencePiece's model sees it, and normalizes a
        # character together with its marks.
        is_other = "\u2581" in text or "a\u0301\u0302" in text or any(map(str.isspace, processor.normalize(text)))
        prompt = None if is_other else tokenizer(text)["input_ids"]
        return plain, prompt, processor.decode([id for id in plain if id != processor.unk_id()])

    return files, expected


def byte_ranks(full):
    """The ranks of a byte-level BPE: 256 bytes, then its merges in their order."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=4000 if full else 600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(full) + ["abab" * 5, "aaaaa aaaa", "  \n\n    x"] * 4, trainer)
    bytes_of = {char: byte for byte, char in bytes_to_unicode().items()}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(bytes_of[char] for char in left + right) for left, right in merges]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def openai_pattern(name):
    """The pattern in tiktoken's own list of encodings."""
    from tiktoken_ext import openai_public

    load, openai_public.load_tiktoken_bpe = openai_public.load_tiktoken_bpe, lambda *_, **__: {}
    pattern = openai_public.ENCODING_CONSTRUCTORS[name]()["pat_str"]
    openai_public.load_tiktoken_bpe = load
    return pattern


def tiktoken_model(name, folder, full):
    import inspect

    import tiktoken
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    ranks = byte_ranks(full)
    end = len(ranks)
    by_id = lambda **tokens: {str(id): {"content": text, "special": True} for text, id in tokens.items()}
    special = {"<|endoftext|>": end, "<|im_end|>": end + 3, "[SEP]": end + 4}
    decoder = by_id(**special)
    around = [[], []]
    if name == "tiktoken-cl100k":
        file, pattern = "cl100k_base.tiktoken", openai_pattern("cl100k_base")
        special = {"<|endoftext|>": end}
        files = {"special_tokens_map.json": {"eos_token": "<|endoftext|>"}}
    elif name == "tiktoken-o200k":
        file, pattern = "tokens.tiktoken", openai_pattern("o200k_base")
        config = {"tiktoken_encoding": "o200k_base", "eos_token": "<|endoftext|>", "added_tokens_decoder": decoder}
        files = {"tokenizer_config.json": config}
    elif name == "tiktoken-llama3":
        file, pattern = "tokenizer.model", inspect.signature(TikTokenConverter).parameters["pattern"].default
        config = {"bos_token": "<|im_end|>", "eos_token": "<|endoftext|>", "add_bos_token": True}
        files = {"tokenizer_config.json": config | {"added_tokens_decoder": decoder}, "config.json": {"model_type": "llama"}}
        around = [[end + 3], []]
    else:
        file, pattern = "qwen.tiktoken", PRETOKENIZE_REGEX
        config = {"tokenizer_class": "QWenTokenizer", "eos_token": "<|endoftext|>", "added_tokens_decoder": decoder}
        files = {"tokenizer_config.json": config}
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (folder / file).write_bytes(b"".join(lines))
    encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

    def expected(text):
        plain = encoding.encode_ordinary(text)
        prompt = around[0] + encoding.encode(text, allowed_special="all") + around[1]
        return plain, prompt, encoding.decode(plain)

    return files, expected


BERT = {
    "bert-uncased": {},
    "bert-cased": {"do_lower_case": False},
    "bert-accents": {"strip_accents": False, "tokenize_chinese_chars": False, "additional_special_tokens": ["<tool>"]},
}


def wordpiece(name, folder, full):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertTokenizer

    config = BERT[name]
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizers.BertNormalizer(lowercase=config.get("do_lower_case", True))
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    size = 6000 if full else 700
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    trained.train_from_iterator(corpus(full), trainer)
    vocab = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in vocab))
    files = {"tokenizer_config.json": {"tokenizer_class": "BertTokenizer"} | config}
    (folder / "tokenizer_config.json").write_text(json.dumps(files["tokenizer_config.json"]))
    tokenizer = BertTokenizer.from_pretrained(folder)
    unknown = tokenizer.unk_token_id

    def expected(text):
        tokenizer._tokenizer.encode_special_tokens = True
        plain = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer._tokenizer.encode_special_tokens = False
        prompt = tokenizer(text)["input_ids"]
        decoded = tokenizer.decode([id for id in plain if id != unknown], skip_special_tokens=True)
        return plain, prompt, decoded

    return files, expected


# The base, a folder of tests/fixtures/tokenizers or a vocabulary of BERT; tokenizer_config.json; the model.
CLASSES = {
    "class-gpt2": ("byte-level", {"tokenizer_class": "GPT2TokenizerFast"}, "gpt2"),
    "class-gpt2-prefix": ("byte-level", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, None),
    "class-gpt2-llama3": ("llama3", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "<|begin_of_text|>"}, None),
    "class-qwen2": ("byte-level", {"tokenizer_class": "Qwen2Tokenizer"}, "qwen3"),
    "class-qwen2-own": ("byte-level", {"tokenizer_class": "PreTrainedTokenizerFast"}, "qwen2"),
    "class-llama": ("llama2", {"tokenizer_class": "LlamaTokenizer"}, "llama"),
    "class-llama-legacy": ("llama2", {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}, None),
    "class-llama-no-prefix": ("mistral", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}, None),
    "class-llama-mistral": ("mistral", {"tokenizer_class": "LlamaTokenizer", "legacy": False}, "mistral"),
    "class-llama-bytes": ("llama3", {"tokenizer_class": "LlamaTokenizer"}, "llama"),
    "class-gemma": (
        "llama2",
        {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "mask_token": None},
        "gemma2",
    ),
    "class-t5": ("unigram", {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}, "t5"),
    "class-bert": ("bert-uncased", {"tokenizer_class": "BertTokenizerFast", "eos_token": "[SEP]"}, None),
    "class-bert-cased": ("bert-uncased", {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "eos_token": "[SEP]"}, "bert"),
}  # fmt: skip


def class_of(name, folder, full):
    """Prompts of transformers for a tokenizer.json whose class changes it."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, BertTokenizer

    base, config, model = CLASSES[name]
    files = {"tokenizer_config.json": config}
    if model:
        files["config.json"] = {"model_type": model}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        for file, value in files.items():
            (scratch / file).write_text(json.dumps(value))
        if base in BERT:
            backend = BertTokenizer.from_pretrained(OUT / base)._tokenizer
            backend.save(str(folder / "tokenizer.json"), pretty=False)
            backend = folder
        else:
            backend = OUT.parent / "tokenizers" / base
            (folder / "base.txt").write_text(f"{base}\n")
        if base == "unigram":
            # The class always adds the token that ends a text.
            made = Tokenizer.from_file(str(backend / "tokenizer.json"))
            made.post_processor = processors_template(made)
            made.save(str(folder / "tokenizer.json"), pretty=False)
            (folder / "base.txt").unlink()
            backend = folder
        shutil.copy(backend / "tokenizer.json", scratch)
        tokenizer = AutoTokenizer.from_pretrained(scratch)
    return files, lambda text: (None, tokenizer(text)["input_ids"], None)


def processors_template(tokenizer):
    from tokenizers import processors

    end = tokenizer.token_to_id("</s>")
    return processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])


TIKTOKEN = ["tiktoken-cl100k", "tiktoken-o200k", "tiktoken-llama3", "tiktoken-qwen"]


def write(root, name, make, cases, full):
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files, expected = make(name, folder, full)
    for file, value in files.items():
        (folder / file).write_text(json.dumps(value, indent=1) + "\n")
    if callable(expected):
        lines = []
        for text, repeat in cases:
            plain, prompt, decoded = expected(text * repeat)
            ids = ["-" if ids is None else hash_ids(ids) for ids in [plain, prompt]]
            lines.append(f"{ids[0]} {ids[1]} {'-' if decoded is None else fnv(decoded.encode())}\n")
        (folder / "expected.txt").write_text("".join(lines))
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(name, size, "bytes", flush=True)


def main():
    full = sys.argv[1:2] == ["--full"]
    root = Path(sys.argv[2]) if full else OUT
    only = sys.argv[3 if full else 1 :]
    root.mkdir(parents=True, exist_ok=True)
    cases = strings(2000 if full else 10)
    (root / "strings.json").write_text(json.dumps(cases, ensure_ascii=False) + "\n")
    makers = [(SENTENCEPIECE, sentencepiece), (T5, t5), (TIKTOKEN, tiktoken_model), (BERT, wordpiece), (CLASSES, class_of)]
    for names, make in makers:
        for name in names:
            if not only or name in only:
                write(root, name, make, cases, full)


if __name__ == "__main__":
    main()
