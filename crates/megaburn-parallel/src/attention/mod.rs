mod core_attention;
mod latent;
mod self_attention;

pub use latent::{MultiLatentAttention, MultiLatentAttentionConfig};
pub use self_attention::{SelfAttention, SelfAttentionConfig};
