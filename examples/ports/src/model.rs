//! What is compared of a model and its port: the logits and the loss of the reference's batch.

use burn::{module::Module, nn::loss::CrossEntropyLossConfig, prelude::Int, tensor::Tensor};

use crate::{bert, bert_port, llama, llama_port, reference::Reference};

pub trait Model: Module {
    /// The logits of tokens, `[batch, seq, vocabulary]`, and the mean loss.
    fn outputs(&self, reference: &Reference) -> (Tensor<3>, Tensor<1>);
}

/// The mean loss of logits `[items, classes]`.
fn loss(logits: Tensor<2>, classes: Tensor<1, Int>) -> Tensor<1> {
    CrossEntropyLossConfig::new()
        .init(&logits.device())
        .forward(logits, classes)
}

/// The loss of each token's logits against the next token.
fn llama_loss(logits: Tensor<3>, tokens: Tensor<2, Int>) -> Tensor<1> {
    let last = tokens.dims()[1] - 1;
    loss(
        logits.narrow(1, 0, last).flatten(0, 1),
        tokens.narrow(1, 1, last).flatten(0, 1),
    )
}

/// The loss of masked tokens, and that of the order of sentences.
fn bert_loss(logits: Tensor<3>, order: Tensor<2>, reference: &Reference) -> Tensor<1> {
    let masked = reference
        .equal::<2>("labels", -100)
        .bool_not()
        .flatten::<1>(0, 1);
    let masked = masked.argwhere().squeeze_dim(1);
    let labels = reference.ints::<2>("labels").flatten::<1>(0, 1);
    let logits = logits.flatten::<2>(0, 1).select(0, masked.clone());
    loss(logits, labels.select(0, masked)) + loss(order, reference.ints("next_sentence_label"))
}

/// Implements `Model` for a model and its port, whose `forward` has the same inputs.
macro_rules! models {
    ($original:ty, $port:ty: |$model:ident, $reference:ident| $outputs:expr) => {
        models!($original: |$model, $reference| $outputs);
        models!($port: |$model, $reference| $outputs);
    };
    ($type:ty: |$model:ident, $reference:ident| $outputs:expr) => {
        impl Model for $type {
            fn outputs(&self, $reference: &Reference) -> (Tensor<3>, Tensor<1>) {
                let $model = self;
                $outputs
            }
        }
    };
}

models!(llama::Llama, llama_port::Llama: |model, reference| {
    let tokens = reference.ints("input_ids");
    let logits = model.forward(tokens.clone());
    (logits.clone(), llama_loss(logits, tokens))
});

models!(bert::Bert, bert_port::Bert: |model, reference| {
    let [tokens, types] = ["input_ids", "token_type_ids"].map(|name| reference.ints(name));
    let is_padding = reference.equal("attention_mask", 0);
    let (logits, order) = model.forward(tokens, types, is_padding);
    (logits.clone(), bert_loss(logits, order, reference))
});
