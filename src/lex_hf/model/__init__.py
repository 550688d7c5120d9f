"""The model: what a saved model carries with it. Its files import torch, transformers and each other only."""
