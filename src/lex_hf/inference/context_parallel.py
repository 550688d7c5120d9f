"""Read one long text with several processes: each takes a part, and hands its last block to the next, layer by layer.

A block attends to itself and the one before, so of all that the other processes hold, a part needs one block of keys
and values a layer, whatever its length. All parts are computed at the same time.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lex_hf.model.cache_layer_lex import LexCacheLayer, Origin
from lex_hf.model.cache_lex import LexCache
from lex_hf.model.masking_lex import FullPattern
from lex_hf.model.rotation_lex import scaled
from lex_hf.rope.block_cache import BlockCacheLayer
from lex_hf.rope.blockwise import reader_of


def part_of(tokens: int, block: int, rank: int, size: int) -> tuple[int, int]:
    """Return where a process's part of a text begins and ends: whole blocks, as equal as they can be.

    Args:
        tokens: Length of the text.
        block: Block length; a multiple of it where layers differ.
        rank: Number of the process.
        size: Number of processes.

    Raises:
        ValueError: If there are fewer blocks than processes.
    """
    blocks = tokens // block  # what is left over goes to the last process
    if blocks < size:
        raise ValueError(
            f"{tokens} tokens are {blocks} blocks of {block}, too few for {size} processes: each needs one at least."
        )
    start, stop = (blocks * place // size * block for place in (rank, rank + 1))
    return start, tokens if rank == size - 1 else stop


@torch.no_grad()
def read_part(
    model: PreTrainedModel, input_ids: torch.Tensor, group: dist.ProcessGroup | None = None, **kwargs: Any
) -> tuple[CausalLMOutputWithPast, tuple[int, int]]:
    """Read a text together with the other processes of a group; every one of them must call this with the same text.

    Args:
        model: A LEX model with blockwise or sliding attention, or one whose layers all read in blocks, see
            [`lex_hf.blockwise`]; the same in every process.
        input_ids: The whole text, shape `(batch, tokens)`, without padding.
        group: The processes; all of them by default.
        kwargs: Passed on to the model, such as `logits_to_keep`.

    Returns:
        What the model returns for this process's part, and where the part begins and ends. The last process's
        `past_key_values` continue the text.

    Raises:
        ValueError: If a layer has full attention, or the text is too short.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    reader = reader_of(model)
    cache = LexCache(model.config) if reader is None else reader.new_cache()
    blocks = [layer.block for layer in cache.layers if isinstance(layer, LexCacheLayer) and layer.block is not None]
    if len(blocks) < len(cache.layers):
        raise ValueError(
            "Layers with full attention need the keys of the whole text: load the model with "
            "attention_pattern='blockwise' or 'sliding', or make all of its layers blockwise."
        )
    if any(layer.pattern.sinks for layer in cache.layers if isinstance(layer, LexCacheLayer)):
        raise ValueError(
            "Sinks are the first tokens of a text, which only the first process reads: make the model blockwise with "
            "sinks=0 for context parallelism."
        )
    start, stop = part_of(input_ids.shape[1], math.lcm(*blocks), rank, size)
    kind = _HandedOver if reader is None else _HandedOverBlocks
    cache.layers = [kind(layer.pattern, group, layer.origin) for layer in cache.layers]
    for layer in cache.layers if start else ():
        layer.begin_at(start)
    part = input_ids[:, start:stop].to(model.device)
    return model(part, past_key_values=cache, use_cache=True, **kwargs), (start, stop)


class _HandedOver(LexCacheLayer):
    """A cache layer whose previous block is that of another process."""

    takes_pieces = False  # the block that is handed over is the last of all

    def __init__(self, pattern: FullPattern, group: dist.ProcessGroup | None, origin: Origin) -> None:
        super().__init__(pattern, origin)
        self.group = group
        self.is_waiting = True

    def begin_at(self, start: int) -> None:
        """Continue after `start` tokens, at least a block, that other processes read."""
        assert self.block is not None
        self.fill, self.lengths, self.columns = self.block, start, start

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the last block over, receive the previous one, and update as usual."""
        if self.is_waiting:
            self.is_waiting = False
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self._exchange(key_states, value_states, decay=args[1])
        return super().update(key_states, value_states, *args, **kwargs)

    def _exchange(self, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor | None) -> None:
        assert self.block is not None
        rank, size, transfers = dist.get_rank(self.group), dist.get_world_size(self.group), []
        if rank + 1 < size:
            # The first block of a text is scaled as the previous one of its pair already; all others are not.
            is_first = rank == 0 and key.shape[2] == self.block
            last = key[:, :, -self.block :]
            for sent in (last if is_first else scaled(last, decay), value[:, :, -self.block :]):
                transfers.append(dist.P2POp(dist.isend, sent.contiguous(), group=self.group, group_peer=rank + 1))
        blocks = (states[:, :, : self.block] for states in (self.keys, self.values))
        received = [torch.empty_like(states) for states in blocks] if rank else []
        transfers += [dist.P2POp(dist.irecv, states, group=self.group, group_peer=rank - 1) for states in received]
        for transfer in dist.batch_isend_irecv(transfers) if transfers else []:
            transfer.wait()
        for storage, states in zip((self.keys, self.values) if rank else (), received, strict=True):
            storage[:, :, : self.block] = states


class _HandedOverBlocks(BlockCacheLayer, _HandedOver):
    """The same for a model that was made blockwise."""
