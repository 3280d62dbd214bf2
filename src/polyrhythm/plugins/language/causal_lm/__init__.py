"""Causal language models: any of transformers from a local folder, or a small Llama from a random start."""
