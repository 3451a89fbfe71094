#!/usr/bin/env python3
"""Trains a small BERT or T5 on text with megaburn and with PyTorch, from the same weights on the same samples, and
measures how many masked tokens of held-out text both predict.

    pip install torch transformers tokenizers megatron-core==0.16.1
    cargo build --release --bins
    masked_curves.py bert --data tinyshakespeare.txt --out runs/masked [--megaburn target/release/megaburn] [--save]

The text is divided into documents, encoded with a WordPiece vocabulary that is trained on it, and read as the masked
samples of Megatron-Core's data sets: megaburn's own, and those of the package megatron-core for PyTorch. The model of
PyTorch is that of Transformers, which `megaburn train --init` starts from. Both are in f32; PyTorch in f64 for the first steps says how far rounding takes two right programs apart.

The accuracy is measured by Transformers on all samples of the held-out documents, with the weights of the last step of
each program; megaburn's are exported by `megaburn convert export`. The peer of the accuracy is the best predictor that
does not read the text: the most frequent of the tokens that are to be predicted.

Writes OUT/MODEL/{megaburn,pytorch,f64}.jsonl and OUT/MODEL/masked_curves.md, with --save also a section on top of
benches/results/masked_curves.md. On a CPU that others use, set OMP_NUM_THREADS=1."""

import argparse, collections, copy, datetime, json, math, pathlib, shutil, subprocess, sys
import torch, torch.nn.functional as F, transformers
from curves_report import facts, table
from masked_samples import MASKING, SENTINELS, samples, write_corpus

HIDDEN, LAYERS, HEADS = 128, 2, 4
# Rows of a step, the tokens of a row, and the tokens that T5's decoder predicts.
BATCH, SEQ_LEN, DECODER_SEQ_LEN = 32, 64, 64
WARMUP, BETAS, EPS, WEIGHT_DECAY, CLIP = 100, (0.9, 0.98), 1e-8, 0.01, 1.0
SPLIT = "90,10"
# The steps whose largest difference is reported first, because training magnifies rounding later.
EARLY = 200


class Bert:
    lr = 4e-3
    settings = {"data.dataset": "bert"}

    def draw(self, vocab):
        config = transformers.BertConfig(
            vocab_size=len(vocab), hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            intermediate_size=4 * HIDDEN, max_position_embeddings=SEQ_LEN, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, initializer_range=0.05)
        return transformers.BertForPreTraining(config)

    def load(self, folder):
        model = transformers.BertForPreTraining.from_pretrained(folder, dtype=torch.float32)
        # Of a random [PAD] the embedding is trained too, as of other words.
        model.bert.embeddings.word_embeddings.padding_idx = None
        return model

    def forward(self, model, rows):
        """Logits, labels with -100 where none counts, and a loss of the rows to add to the mean over labels."""
        # A random token may be [PAD]. Megatron-LM excludes it from attention; megaburn, and Google's BERT, do not.
        mask = rows["padding_mask"].flip(1).cummax(1).values.flip(1)
        found = model(input_ids=rows["text"], attention_mask=mask, token_type_ids=rows["types"])
        labels = rows["labels"].where(rows["loss_mask"] == 1, -100)
        return found.prediction_logits, labels, F.cross_entropy(found.seq_relationship_logits, rows["is_random"])


class T5:
    lr = 1e-3
    settings = {"data.dataset": "t5", "data.decoder_seq_len": DECODER_SEQ_LEN}

    def draw(self, vocab):
        config = transformers.T5Config(
            vocab_size=len(vocab), d_model=HIDDEN, d_kv=HIDDEN // HEADS, d_ff=4 * HIDDEN, num_layers=LAYERS,
            num_decoder_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0, feed_forward_proj="gated-gelu",
            tie_word_embeddings=False, pad_token_id=vocab["[PAD]"], eos_token_id=vocab["[EOS]"],
            decoder_start_token_id=vocab["[BOS]"])
        model = transformers.T5ForConditionalGeneration(config)
        # Transformers draws both for learning rates that are relative to them, as Adafactor's.
        for matrix in (model.shared, model.lm_head):
            matrix.weight.data.mul_(HIDDEN**-0.5)
        return model

    def load(self, folder):
        return transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)

    def forward(self, model, rows):
        found = model(input_ids=rows["text_enc"], attention_mask=rows["enc_mask"], decoder_input_ids=rows["text_dec"],
                      use_cache=False)
        return found.logits, rows["labels"].where(rows["loss_mask"] == 1, -100), 0.0


KINDS = {"bert": Bert, "t5": T5}


def batches(set, order, device):
    """The samples of these numbers as tensors, `BATCH` at a time."""
    for first in range(0, len(order), BATCH):
        rows = [set[number] for number in order[first : first + BATCH]]
        yield {name: torch.tensor([row[name] for row in rows], device=device) for name in rows[0]}


def rate(largest, trained, steps):
    """The value for the update after which this number of steps were done: it decays to a tenth of the largest."""
    if trained < WARMUP:
        return largest * trained / WARMUP
    return largest * (0.1 + 0.45 * (math.cos(math.pi * (trained - WARMUP) / (steps - WARMUP)) + 1))


def pytorch(kind, model, set, args, steps):
    """Yields a step at a time what `metrics.jsonl` has, of the first `steps` steps."""
    params = list(model.to(args.device).train().parameters())
    groups = [dict(params=[p for p in params if (p.dim() > 1) == decays], weight_decay=WEIGHT_DECAY * decays) for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=kind.lr, betas=BETAS, eps=EPS)
    for step, rows in enumerate(batches(set, range(steps * BATCH), args.device)):
        lr = rate(kind.lr, step + 1, args.steps)
        logits, labels, of_rows = kind.forward(model, rows)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        (loss + of_rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(params, CLIP).item()
        yield dict(step=step + 1, loss=loss.item(), grad_norm=norm, lr=lr, sop_loss=float(of_rows))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()


def call(args, log, *command):
    with open(log, "a") as log:
        subprocess.run([str(word) for word in (args.megaburn, *command)], check=True, stdout=log, stderr=subprocess.STDOUT)


def megaburn(kind, folder, args):
    """The lines of `metrics.jsonl`, and the folder of the model that was trained."""
    run, exported, log = args.out / "run", args.out / "exported", args.out / "megaburn.log"
    probability, max_ngram, geometric = MASKING[args.model]
    settings = {
        "run.dir": run, "run.seed": args.seed, "run.device": args.device, "data.tokenizer": args.out / "vocab.txt",
        "data.cache_dir": args.out / "cache", "data.seq_len": SEQ_LEN, "data.split": SPLIT, "data.masking.probability": probability,
        "data.masking.max_ngram": max_ngram, "data.masking.geometric": str(geometric).lower(),
        "train.global_batch": BATCH, "train.micro_batch": args.micro_batch, "train.eval_interval": args.steps // 4, "train.eval_batches": 1000,
        "train.checkpoint_interval": args.steps, "train.log_interval": 50, "optimizer.lr": kind.lr, "optimizer.min_lr": kind.lr / 10,
        "optimizer.warmup_steps": WARMUP, "optimizer.beta1": BETAS[0], "optimizer.beta2": BETAS[1], "optimizer.eps": EPS,
        "optimizer.weight_decay": WEIGHT_DECAY, "optimizer.clip_grad": CLIP, **kind.settings,
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = ["train", "--init", folder, "--data", args.out / "text", "--layout", args.layout, "--steps", args.steps, "--fresh"]
    call(args, log, *command, *sets)
    shutil.rmtree(exported, ignore_errors=True)
    call(args, log, "convert", "export", run, exported)
    lines = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    return [line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line], exported


@torch.no_grad()
def held_out(kind, model, set, special, args):
    """How many of the tokens of the text the model predicts, the largest share of one of them, the mean loss over all
    labels, and the entropy of the tokens in nats, which is the loss of the best predictor that does not read the text."""
    model.to(args.device).eval()
    known, loss, num = 0, 0.0, 0
    counts = collections.Counter()
    for rows in batches(set, range(len(set)), args.device):
        logits, labels, _ = kind.forward(model, rows)
        loss += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum").item()
        num += (labels != -100).sum().item()
        counts_of = (labels != -100) & ~torch.isin(labels, special.to(labels.device))
        # Of a token of the text it is known that it is no sentinel and not the end.
        logits[..., special] = -math.inf
        known += (logits.argmax(-1) == labels)[counts_of].sum().item()
        counts.update(labels[counts_of].tolist())
    total = counts.total()
    entropy = -sum(count / total * math.log(count / total) for count in counts.values())
    [(_, most)] = counts.most_common(1)
    return dict(accuracy=known / total, unigram=most / total, loss=loss / num, entropy=entropy, tokens=total, samples=len(set))


def report(name, curves, evals, found, lines):
    def difference(one, other, steps):
        pairs = list(zip(curves[one], curves[other]))[:steps]
        return f"{max(abs(a['loss'] - b['loss']) for a, b in pairs):.1e}"

    def mean(who):
        last = curves[who][-20:]
        return f"{sum(line['loss'] for line in last) / len(last):.4f}"

    steps = len(curves["pytorch"])
    counts = [count for count in (10, 50, 100, EARLY) if count <= steps]
    pairs = [("megaburn", "pytorch"), ("megaburn", "f64"), ("pytorch", "f64")]
    head = ["program", "loss, first step", f"loss, last 20 of {steps} steps", "held-out loss", "held-out tokens predicted"]
    rows = [[who, f"{curves[who][0]['loss']:.4f}", mean(who), f"{found[who]['loss']:.4f}", f"{found[who]['accuracy']:.1%}"] for who in ("megaburn", "pytorch")]
    any = found["megaburn"]
    rows.append(["most frequent token", "", "", f"{any['entropy']:.4f}", f"{any['unigram']:.1%}"])
    notes = [
        "",
        table(
            "largest difference between two losses of the same step, in nats",
            ["programs", *(f"{count} steps" for count in counts)],
            [[" and ".join(pair), *(difference(*pair, count) for count in counts)] for pair in pairs],
        ),
        f"f64 is PyTorch in f64: how far rounding to f32 takes two right programs apart. In all {steps} steps megaburn and PyTorch are {difference('megaburn', 'pytorch', steps)} apart at most.",
        f"Held out: {any['samples']} samples with {any['tokens']} masked tokens of the text. megaburn's own evaluation after the last step: {evals[-1]['eval_loss']:.4f}.",
    ]
    facts = "".join(f"- {key}: {value}\n" for key, value in lines.items())
    return "\n".join([facts, table(name, head, rows), *notes]) + "\n"


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("model", choices=KINDS)
    ap.add_argument("--data", type=pathlib.Path, required=True)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--megaburn", default="target/release/megaburn")
    ap.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    ap.add_argument("--layout", default="tp1")
    ap.add_argument("--steps", type=int, default=1000)
    ap.add_argument("--micro-batch", type=int, default=BATCH)
    ap.add_argument("--seed", type=int, default=1234, help="of weights and samples")
    ap.add_argument("--save", action="store_true")
    args = ap.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    args.out /= args.model
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    kind = KINDS[args.model]()
    vocab = write_corpus(args.data, args.out)
    call(args, args.out / "megaburn.log", "data", "preprocess", args.out / "text.jsonl", "--tokenizer", args.out / "vocab.txt", "--split-sentences", "--out", args.out / "text")
    torch.manual_seed(args.seed)
    kind.draw(vocab).save_pretrained(args.out / "model")
    model = kind.load(args.out / "model")
    train, valid = samples(args.model, args.out, vocab, args.seed, SPLIT, SEQ_LEN, DECODER_SEQ_LEN, args.steps * BATCH)
    special = torch.tensor([vocab[token] for token in ("[EOS]", *SENTINELS)])
    curves, found = {}, {}
    curves["megaburn"], evals, exported = megaburn(kind, args.out / "model", args)
    precise = copy.deepcopy(model).double()
    curves["pytorch"] = list(pytorch(kind, model, train, args, args.steps))
    curves["f64"] = list(pytorch(kind, precise, train, args, min(EARLY, args.steps)))
    for (who, trained) in (("megaburn", kind.load(exported)), ("pytorch", model)):
        found[who] = held_out(kind, trained, valid, special, args)
    for who, curve in curves.items():
        (args.out / f"{who}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in curve))
    if [len(curves[who]) for who in found] != [args.steps] * 2:
        sys.exit("a curve has other steps")
    command = f"benches/peer/masked_curves.py {args.model} --data {args.data.name} --steps {args.steps} --layout {args.layout} --device {args.device} --seed {args.seed}"
    text = report(args.model, curves, evals, found, facts(args, command))
    text = f"## masked_curves, {args.model}, {datetime.date.today().isoformat()}\n\n{text}"
    print(text)
    (args.out / "masked_curves.md").write_text(text)
    if args.save:
        path = pathlib.Path(__file__).resolve().parent.parent / "results" / "masked_curves.md"
        known = path.read_text()
        begin = known.index("\n## ") + 1 if "\n## " in known else len(known)
        path.write_text(known[:begin] + f"{text}\n" + known[begin:])


if __name__ == "__main__":
    main()
