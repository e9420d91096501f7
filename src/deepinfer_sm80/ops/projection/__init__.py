"""From attention output to the model's width: inverse RoPE and the grouped low-rank projection."""
