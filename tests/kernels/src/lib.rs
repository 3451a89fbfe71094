//! The tests of all operations on a GPU: each is compared with the CPU, on fresh random inputs of
//! aligned and ragged shapes.
//!
//! `main.rs` runs them in one process. The executable made by `.ci/bundle` contains them too, and
//! runs them in many. Without feature `cuda` this crate is empty.

#![cfg(feature = "cuda")]

mod attention;
mod attention_bias;
mod attention_parts;
mod bias;
mod compare;
mod cross_entropy;
mod cudnn;
mod dropout;
mod edges;
mod embedding;
mod fp8;
mod fp8_blocks;
mod fp8_products;
mod grouped;
mod hash;
mod linear;
mod moe;
mod moe_losses;
mod moe_router;
mod norms;
mod optimizer;
mod optimizer_bits;
mod optimizer_many;
mod optimizer_room;
mod optimizer_rules;
pub mod part;
mod pointwise;
mod quantized;
mod quantized_shards;
mod repeat;
mod sent_weights;
mod softmax;
mod sums;

/// A test: returns what is wrong.
pub type TestFn = fn() -> Result<(), String>;
/// A test with its name.
type Test = (&'static str, TestFn);

/// All tests. The ones in `kernels::cudnn` need cuDNN: see [`has_cudnn`].
pub fn tests() -> impl Iterator<Item = (String, TestFn)> {
    let modules = [
        ("attention", attention::TESTS),
        ("attention_bias", attention_bias::TESTS),
        ("attention_parts", attention_parts::TESTS),
        ("bias", bias::TESTS),
        ("cross_entropy", cross_entropy::TESTS),
        ("dropout", dropout::TESTS),
        ("edges", edges::TESTS),
        ("embedding", embedding::TESTS),
        ("fp8", fp8::TESTS),
        ("fp8_blocks", fp8_blocks::TESTS),
        ("fp8_products", fp8_products::TESTS),
        ("grouped", grouped::TESTS),
        ("hash", hash::TESTS),
        ("linear", linear::TESTS),
        ("moe", moe::TESTS),
        ("moe_losses", moe_losses::TESTS),
        ("moe_router", moe_router::TESTS),
        ("norms", norms::TESTS),
        ("optimizer", optimizer::TESTS),
        ("optimizer_bits", optimizer_bits::TESTS),
        ("optimizer_many", optimizer_many::TESTS),
        ("optimizer_room", optimizer_room::TESTS),
        ("optimizer_rules", optimizer_rules::TESTS),
        ("pointwise", pointwise::TESTS),
        ("quantized", quantized::TESTS),
        ("quantized_shards", quantized_shards::TESTS),
        ("repeat", repeat::TESTS),
        ("sent_weights", sent_weights::TESTS),
        ("softmax", softmax::TESTS),
        ("sums", sums::TESTS),
        ("cudnn", cudnn::TESTS),
    ];
    modules.into_iter().flat_map(|(module, tests)| {
        tests
            .iter()
            .map(move |(name, test)| (format!("kernels::{module}::{name}"), *test))
    })
}

/// Whether cuDNN is installed. Prints its version, or why the tests that need it are skipped.
pub fn has_cudnn() -> bool {
    let found = megaburn_cuda::cudnn::found();
    match &found {
        Ok(found) => eprintln!("cuDNN {found}"),
        Err(error) => eprintln!("the tests of kernels::cudnn are left out: {error}"),
    }
    found.is_ok()
}

/// The tests of `--quick` by the starts of their names: at least one per module, chosen for coverage
/// per time.
pub const QUICK: [&str; 25] = [
    "kernels::attention::fused_attention_reads_views",
    "kernels::attention::the_kernel_is_the_one_that_was_chosen",
    "kernels::attention_bias::parts_with_a_bias_are_those_of_the_cpu",
    "kernels::attention_parts::parts_of_attention_join_as_on_the_cpu",
    "kernels::cross_entropy::losses_and_their_gradients",
    "kernels::cudnn::attention_of_every_head_size",
    "kernels::dropout::dropout_masks",
    "kernels::edges::no_tokens_give_none_and_gradients_of_0",
    "kernels::embedding::",
    "kernels::fp8::ties_go_to_even",
    "kernels::fp8_products::the_three_products_of_a_layer",
    "kernels::grouped::matrices_of_stretches_are_read_once",
    "kernels::hash::",
    "kernels::linear::linear_in_every_form",
    "kernels::moe::rows_are_taken_and_summed_as_on_the_cpu",
    "kernels::moe_router::no_tokens_go_nowhere",
    "kernels::norms::norms_of_long_rows",
    "kernels::optimizer::adamw_is_its_definition",
    "kernels::optimizer_bits::",
    "kernels::optimizer_many::many_are_stepped_as_one_by_one_to_the_bit",
    "kernels::optimizer_room::no_room_is_where_memory_is_not_cut",
    "kernels::optimizer_rules::nan_stays_where_it_is",
    "kernels::pointwise::rope_and_activations",
    "kernels::quantized_shards::",
    "kernels::softmax::scores_that_others_hold_stay",
];

/// The name prefix of tests that need cuDNN.
pub const OF_CUDNN: &str = "kernels::cudnn::";
