"""Every causal architecture of the installed transformers, tiny and with random weights, and what must hold for it."""
