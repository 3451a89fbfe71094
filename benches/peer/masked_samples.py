"""A corpus of sentences with its vocabulary, and the samples that Megatron-Core's data sets make of it."""

import json, tempfile, warnings

warnings.filterwarnings("ignore")
import numpy, tokenizers, torch
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

SENTINELS = [f"<extra_id_{number}>" for number in range(40)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]", *SENTINELS]
VOCAB = 500
# Parts of the text between empty lines, such as the speeches of a play, of which a document is made.
PARTS = 12
# The fraction of the tokens that is masked, the most words of an n-gram, and whether their number is drawn from a
# geometric distribution. T5 learns only from masked tokens, of which 15% would be few in 1,000 steps.
MASKING = {"bert": (0.15, 1, False), "t5": (0.5, 10, True)}


def write_corpus(text, out):
    """Writes text.jsonl and vocab.txt. Returns the ids of the vocabulary."""
    parts = [" ".join(part.split()) for part in text.read_text().split("\n\n")]
    documents = [" ".join(parts[first : first + PARTS]) for first in range(0, len(parts), PARTS)]
    (out / "text.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    wordpiece = tokenizers.BertWordPieceTokenizer(lowercase=True)
    wordpiece.train_from_iterator(documents, vocab_size=VOCAB, special_tokens=SPECIAL, show_progress=False)
    vocab = sorted(wordpiece.get_vocab(), key=wordpiece.get_vocab().get)
    (out / "vocab.txt").write_text("".join(f"{token}\n" for token in vocab))
    return {token: id for id, token in enumerate(vocab)}


class Tokenizer:
    """What the data sets ask of a tokenizer."""

    def __init__(self, vocab):
        self.inv_vocab = {id: token for token, id in vocab.items()}
        self.pad, self.cls, self.sep, self.mask, self.bos, self.eos = (vocab[f"[{name}]"] for name in ("PAD", "CLS", "SEP", "MASK", "BOS", "EOS"))
        self.additional_special_tokens_ids = [vocab[token] for token in SENTINELS]
        self.unique_identifiers = {"class": "vocab"}


class Samples:
    """The fields of each sample as lists."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, number):
        return {name: numpy.asarray(value).astype(int).tolist() for name, value in self.dataset[number].items()}


def samples(kind, out, vocab, seed, split, seq_len, decoder_seq_len, num):
    """The samples for training, at least `num`, and those of one epoch of the held-out documents."""
    of = {
        "bert": (BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig, dict(classification_head=True)),
        "t5": (T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig, dict(sequence_length_decoder=decoder_seq_len)),
    }
    dataset, config, more = of[kind]
    probability, max_ngram, geometric = MASKING[kind]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    config = config(
        random_seed=seed, sequence_length=seq_len, blend=([str(out / "text")], None), split=split,
        path_to_cache=str(out / "megatron"), tokenizer=Tokenizer(vocab), masking_probability=probability,
        short_sequence_probability=0.1, masking_max_ngram=max_ngram, masking_do_full_word=True,
        masking_do_permutation=False, masking_use_longer_ngrams=False, masking_use_geometric_distribution=geometric, **more)
    train, valid, _ = BlendedMegatronDatasetBuilder(dataset, [num, 1, None], lambda: True, config).build()
    return Samples(train), Samples(valid)
