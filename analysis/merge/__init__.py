"""The merge study: what int4 leaves of a recovery LoRA that is merged, and what the unmerged one costs."""
