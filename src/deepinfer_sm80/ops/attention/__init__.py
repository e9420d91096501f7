"""Sparse multi-head latent attention: index builders, decode over paged records, prefill over a gathered workspace."""
