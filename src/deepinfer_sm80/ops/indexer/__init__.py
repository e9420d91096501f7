"""Which compressed rows a query attends to: index queries and keys, scores, candidate blocks, top-k."""
