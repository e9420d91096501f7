"""DeepSeek-V4.1 in plain PyTorch, built from the operators' references: configuration, checkpoint, forward pass."""
