"""Attention arithmetic on tensors: weights, masks, rotary embeddings. Knows no model, cache or trace."""
