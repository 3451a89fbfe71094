//! The routers of a decoder, and the biases that they select experts by.

use megaburn_parallel::Router;

use super::Decoder;

impl Decoder {
    /// Paths of the parameters that stay f32 if the others are narrower, because small updates
    /// would be lost.
    pub fn f32_params(&self) -> impl Iterator<Item = String> {
        let biased = self.routers().filter(|(_, router)| router.bias.is_some());
        biased.map(|(index, _)| format!("blocks.{index}.moe.router.bias"))
    }

    /// Updates the expert biases: `moved` gets the number and the biases of a layer and returns the
    /// new biases.
    pub fn move_expert_biases(&mut self, moved: impl Fn(usize, &[f32]) -> Vec<f32>) {
        for (index, block) in self.blocks.iter_mut().enumerate() {
            if let Some(moe) = block.as_mut().and_then(|block| block.moe.as_mut())
                && let Some(biases) = moe.router.biases()
            {
                moe.router.set_bias(&moved(index, &biases));
            }
        }
    }

    /// The routers of this rank's layers, with the numbers of the layers.
    pub fn routers(&self) -> impl Iterator<Item = (usize, &Router)> {
        let blocks = self.blocks.iter().enumerate();
        blocks.filter_map(|(index, block)| Some((index, &block.as_ref()?.moe.as_ref()?.router)))
    }
}
