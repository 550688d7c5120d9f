"""Measurements of models: perplexity, comparison, attention resolution, receptive field, position checks."""
