"""N-gram memory: hashed rows of host-resident FP8 tables."""
