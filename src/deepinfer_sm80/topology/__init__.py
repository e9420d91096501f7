"""Whether and how DeepSeek-V4.1 fits a set of GPUs, known before the download. Standard library only."""
