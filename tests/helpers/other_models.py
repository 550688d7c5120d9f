"""Tiny models of transformers."""

from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

VOCABULARY = {"vocab_size": 97, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=24, n_head=3, n_layer=2, n_positions=64, **VOCABULARY))


def llama() -> PreTrainedModel:
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 20}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, **VOCABULARY))


def gpt_neox() -> PreTrainedModel:
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 20}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **VOCABULARY))


def bert() -> PreTrainedModel:
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 20}
    return BertLMHeadModel(BertConfig(vocab_size=97, **sizes))
