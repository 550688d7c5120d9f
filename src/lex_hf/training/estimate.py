"""Estimates of a training before it starts: parameters, tokens, memory and arithmetic."""

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from lex_hf.model.configuration_lex import LexConfig
from lex_hf.model.modeling_lex import LexForCausalLM

# Bytes that an optimiser keeps for a parameter in float32; others are not estimated.
_OPTIMIZER_BYTES = {"adamw_torch": 8, "adamw_torch_fused": 8, "sgd": 0, "adagrad": 4}

HOW_MEMORY_IS_ESTIMATED = (
    "Weights and gradients: 4 bytes for each parameter. Optimiser: 8 bytes more for AdamW. Activations: the bytes "
    "that PyTorch keeps for the backward pass of one batch, counted in a forward pass of this very model on tensors "
    "without storage (with activation checkpointing: the outputs of the layers, and one layer in full), and the "
    "gradient of the logits where they exist. Not counted: workspaces of kernels, buffers of communication, "
    "fragmentation, and the memory of the device's own software."
)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    weights: int
    gradients: int
    optimizer: int | None  # state of the optimiser; `None` for an unknown one
    activations: int  # tensors of one batch that the backward pass needs

    @property
    def total(self) -> int:
        """The sum of what is known."""
        return self.weights + self.gradients + (self.optimizer or 0) + self.activations


@dataclass(frozen=True)
class Estimate:
    """Estimate of the resources of a training.

    A token takes floating-point operations forward and backward: 6 for each parameter that it is multiplied with, and
    12 x hidden_size for each key that a query sees, in each layer.
    """

    parameters: int
    parameters_without_embeddings: int  # those of embeddings of tokens or positions, or of the head, do not count
    devices: int
    batch_size: int  # examples that a device takes at once
    accumulation: int  # batches that a device takes for a step
    examples_per_step: int  # over all devices
    tokens_per_step: int  # over all devices
    steps: int | None  # `None` if the number of epochs decides
    tokens: int | None  # of all steps
    memory: Memory
    flops_per_token: int
    flops: int | None  # for all tokens

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, as JSON can hold them."""
        numbers = asdict(self)
        numbers["memory"] |= {"total": self.memory.total, "method": HOW_MEMORY_IS_ESTIMATED}
        return numbers


def estimate(
    config: LexConfig,
    *,
    length: int,
    batch_size: int,
    accumulation: int = 1,
    devices: int = 1,
    steps: int | None = None,
    optimizer: str = "adamw_torch",
    mixed_precision: bool = False,
    activation_checkpointing: bool = False,
    sharded: bool = False,
) -> Estimate:
    """Estimate the resources of a training, without using memory or computing anything.

    Args:
        config: Configuration of the model.
        length: Tokens in an example.
        batch_size: Examples that a device takes at once.
        accumulation: Batches that a device takes for a step.
        devices: Devices that train.
        steps: Optimiser steps.
        optimizer: Name of the optimiser, as `TrainingArguments.optim` has it.
        mixed_precision: Whether the forward pass runs in bfloat16 or float16.
        activation_checkpointing: Whether layers are computed again in the backward pass.
        sharded: Whether weights, gradients and optimiser are sharded over the devices (FSDP).

    Raises:
        ValueError: If a number is less than 1, or too large for any device.
    """
    _check_sizes(config, batch_size, length, accumulation=accumulation, devices=devices, steps=steps)
    counts = _count_parameters(config)
    shards = devices if sharded else 1
    per_parameter = _OPTIMIZER_BYTES.get(optimizer)
    weights = 4 * -(-counts["all"] // shards)
    activations = activation_bytes(
        config, batch_size, length, mixed_precision=mixed_precision, checkpointing=activation_checkpointing
    )
    state = None if per_parameter is None else per_parameter * weights // 4
    examples = batch_size * accumulation * devices
    tokens = None if steps is None else steps * examples * length
    keys = sum(visible_keys(config, pattern, length) for pattern in config.layer_patterns)
    flops_per_token = 6 * counts["multiplied"] + round(12 * config.hidden_size * keys)
    return Estimate(
        parameters=counts["all"],
        parameters_without_embeddings=counts["inner"],
        devices=devices,
        batch_size=batch_size,
        accumulation=accumulation,
        examples_per_step=examples,
        tokens_per_step=examples * length,
        steps=steps,
        tokens=tokens,
        memory=Memory(weights=weights, gradients=weights, optimizer=state, activations=activations),
        flops_per_token=flops_per_token,
        flops=None if tokens is None else tokens * flops_per_token,
    )


def _check_sizes(config: LexConfig, batch_size: int, length: int, **counts: int | None) -> None:
    for name, value in {"length": length, "batch_size": batch_size, **counts}.items():
        if value is not None and not 1 <= value < 2**53:
            raise ValueError(f"{name} = {reprlib.repr(value)}: it must be at least 1 and less than 2**53.")
    widest = max(config.vocab_size, config.hidden_size, config.intermediate_size)
    if batch_size * length * max(widest, config.num_attention_heads * length) >= 2**60:
        raise ValueError(
            f"A batch of {batch_size} x {length} tokens, with {widest} values for each, is too large for any device."
        )


def visible_keys(config: LexConfig, pattern: str, length: int) -> float:
    """Return the mean number of keys that a query of an attention pattern sees, over the tokens of one text."""
    span = config.attention_span(pattern)
    if span is None or span >= length:
        return (length + 1) / 2
    if pattern == "sliding":
        return span - span * (span - 1) / (2 * length)  # the first span tokens see one key more each
    blocks, rest = divmod(length, span)
    own = blocks * span * (span + 1) / 2 + rest * (rest + 1) / 2
    return (own + span * (length - span)) / length  # from the second block on, the whole block before


def activation_bytes(
    config: LexConfig, batch_size: int, length: int, *, mixed_precision: bool, checkpointing: bool
) -> int:
    """Return the bytes that the backward pass of a batch needs, besides parameters and their gradients."""
    count = _checkpointed_bytes if checkpointing else _saved_bytes
    logits = 0 if config.chunked_loss else batch_size * length * config.vocab_size * 4
    return count(config, batch_size, length, mixed_precision) + logits


def fields_of(config: LexConfig) -> dict[str, Any]:
    """Return the fields of `LexConfig` alone, without those that every configuration has."""
    values = config.to_dict()
    return {name: values[name] for name in LexConfig.__annotations__ if name in values}


def _count_parameters(config: LexConfig) -> dict[str, int]:
    model = _without_storage(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(sizes.values())
    positions = sum(size for name, size in sizes.items() if name.startswith("model.positions."))
    table = sizes["model.embed_tokens.weight"]
    # A tied table is counted once, and multiplies as the head.
    head = sizes.get("lm_head.weight", table)
    inner = total - table - positions - sizes.get("lm_head.weight", 0)
    return {"all": total, "inner": inner, "multiplied": inner + head}


def _without_storage(config: LexConfig) -> LexForCausalLM:
    try:
        with torch.device("meta"):
            return LexForCausalLM(config)
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes that PyTorch cannot even count
        raise ValueError(f"A model of these sizes cannot be made: {str(error).splitlines()[0]}") from error


def _saved_bytes(config: LexConfig, batch_size: int, length: int, mixed_precision: bool) -> int:
    """Count the bytes of all tensors that the forward pass keeps for the backward pass, except parameters."""
    if "learned" in config.layer_schemes:
        # They read the positions, which have no storage either, and keep next to nothing.
        config = LexConfig(**fields_of(config) | {"position_embedding_type": "none"})
    model = _without_storage(config).train()
    with FakeTensorMode():
        parameters = {name: torch.empty(each.shape, requires_grad=True) for name, each in model.named_parameters()}
        embedded = torch.empty(batch_size, length, config.hidden_size, requires_grad=True)
        labels = torch.empty(batch_size, length, dtype=torch.long)
        options = {"inputs_embeds": embedded, "labels": labels, "use_cache": False}
        with (
            count_saved_bytes(parameters) as saved,
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed_precision),
        ):
            loss = torch.func.functional_call(model, parameters, (), options).loss
        assert loss.requires_grad
        return saved.total


def _checkpointed_bytes(config: LexConfig, batch_size: int, length: int, mixed_precision: bool) -> int:
    """Count the bytes of what lies between the layers, and of the largest of them: they are computed one at a time."""
    kinds = dict.fromkeys(zip(config.layer_patterns, config.layer_schemes, strict=True))
    one_layer = [
        fields_of(config) | {"num_hidden_layers": 1, "attention_pattern": pattern, "position_embedding_type": scheme}
        for pattern, scheme in kinds
    ]
    largest = max(_saved_bytes(LexConfig(**fields), batch_size, length, mixed_precision) for fields in one_layer)
    return largest + config.num_hidden_layers * batch_size * length * config.hidden_size * 4


class count_saved_bytes(saved_tensors_hooks):  # noqa: N801 - a context manager, like those of torch
    """Counts the bytes of the tensors, except `parameters`, that autograd keeps in the context; each storage once."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__(self._keep, lambda tensor: tensor)
        self._apart = {each.untyped_storage()._cdata for each in parameters.values()}
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no two have the same address

    @property
    def total(self) -> int:
        """Bytes kept so far."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def __enter__(self) -> "count_saved_bytes":  # type: ignore[override] # the hooks return nothing
        super().__enter__()
        return self

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._apart:
            self._storages[storage._cdata] = storage
        return tensor
