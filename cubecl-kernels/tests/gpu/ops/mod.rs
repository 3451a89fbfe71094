//! Compares every operation on a GPU with the CPU, on fresh random inputs of aligned and ragged
//! shapes.

mod attention;
mod attention_parts;
mod bias;
mod compare;
mod cross_entropy;
mod cudnn;
mod dropout;
mod edges;
mod embedding;
mod grouped;
mod linear;
mod moe;
mod moe_losses;
mod moe_router;
mod norms;
mod optimizer;
mod optimizer_many;
mod optimizer_room;
mod optimizer_rules;
pub(crate) mod part;
mod pointwise;
mod repeat;
mod softmax;
mod sums;

/// A test's name, and the function that returns what is wrong.
pub(crate) type Test = (&'static str, fn() -> Result<(), String>);

/// All tests. The ones in `kernels::cudnn` need cuDNN: see [`has_cudnn`].
pub(crate) fn tests() -> impl Iterator<Item = (String, fn() -> Result<(), String>)> {
    let modules = [
        ("attention", attention::TESTS),
        ("attention_parts", attention_parts::TESTS),
        ("bias", bias::TESTS),
        ("cross_entropy", cross_entropy::TESTS),
        ("dropout", dropout::TESTS),
        ("edges", edges::TESTS),
        ("embedding", embedding::TESTS),
        ("grouped", grouped::TESTS),
        ("linear", linear::TESTS),
        ("moe", moe::TESTS),
        ("moe_losses", moe_losses::TESTS),
        ("moe_router", moe_router::TESTS),
        ("norms", norms::TESTS),
        ("optimizer", optimizer::TESTS),
        ("optimizer_many", optimizer_many::TESTS),
        ("optimizer_room", optimizer_room::TESTS),
        ("optimizer_rules", optimizer_rules::TESTS),
        ("pointwise", pointwise::TESTS),
        ("repeat", repeat::TESTS),
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
pub(crate) fn has_cudnn() -> bool {
    let found = megaburn_cuda::cudnn::found();
    match &found {
        Ok(found) => eprintln!("cuDNN {found}"),
        Err(error) => eprintln!("the tests of kernels::cudnn are left out: {error}"),
    }
    found.is_ok()
}

/// The name prefix of tests that need cuDNN.
pub(crate) const OF_CUDNN: &str = "kernels::cudnn::";
