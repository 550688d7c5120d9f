"""Many requests at once: rows of one preallocated cache, which texts join and leave at any step."""

from lex_hf.inference.batching.entry import destroy_kept, generate_batch, init, running
from lex_hf.inference.batching.manager import BlockBatchingManager

__all__ = ["BlockBatchingManager", "destroy_kept", "generate_batch", "init", "running"]
