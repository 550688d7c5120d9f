"""Blockwise causal attention for other models: any decoder of transformers with rotary positions."""
