"""Weights of other models: official LEX checkpoints and GPT-2."""
