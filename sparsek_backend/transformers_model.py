"""Native sparse attention's Llama as a Transformers model: AutoModelForCausalLM, Trainer, generate.

AutoConfig imports this module when a checkpoint asks for it, by
:mod:`sparsek_backend.transformers_hook`, and it registers the class.  It has the folders
and parameters of :class:`sparsek_backend.nn.NSALlamaForCausalLM`, which vLLM serves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from sparsek_backend.nn import NSAConfig, NSALlamaConfig
from sparsek_backend.nn.cache import NSACache, unchanged_on_error
from sparsek_backend.nn.llama import ARCHITECTURE, NSALlamaModel, gathered, is_sharded
from sparsek_backend.transformers_config import NSALlamaHFConfig

__all__ = ["NSALlamaForCausalLM", "NSALlamaHFConfig"]

_INNER = ("output_attentions", "output_hidden_states")
"""Keywords that ask for what layers compute."""


class NSALlamaCache:
    """The caches of all layers, as ``past_key_values``; they grow as tokens come."""

    is_compileable = False  # ``generate`` asks
    is_linear = (False,)  # the same: whether layers keep a state in place of keys

    def __init__(self, layers: list[NSACache]) -> None:
        self.layers = layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen so far."""
        return self.layers[layer_idx].length

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens, and for as many as there are."""
        for cache in self.layers:
            due = cache.length + count
            if due > cache.max_len:
                cache.reserve(max(due, 2 * cache.max_len))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let beam ``i`` go on from beam ``beam_idx[i]``."""
        for cache in self.layers:
            cache.reorder(beam_idx.to(cache.selected.device))


class NSALlamaForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """:class:`sparsek_backend.nn.NSALlamaForCausalLM` under Transformers' base class.

    Args:
        config: Llama's sizes and an ``nsa`` section, which is filled in where there is none.

    Raises:
        TypeError: a field of ``nsa`` has a wrong type.
        ValueError: an unknown field of ``nsa``, or a value out of range.
    """

    config_class = NSALlamaHFConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NSALlamaDecoderLayer"]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: NSALlamaHFConfig) -> None:
        super().__init__(config)
        if not hasattr(config, "nsa"):
            config.nsa = NSAConfig().to_dict()
        sizes = {**config.to_dict(), "architectures": [ARCHITECTURE]}
        self.model = NSALlamaModel(NSALlamaConfig.from_dict(sizes))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        past_key_values: NSALlamaCache | None = None,
        cache: NSALlamaCache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tokens that the cache has not seen, and the cache: ``cache`` from Transformers 5.24.

        ``generate`` passes a mask on because the last argument has this name.
        """
        past_key_values = past_key_values if cache is None else cache
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        names = ("attention_mask", "use_cache", "logits_to_keep", *_INNER)
        passed = {name: kwargs[name] for name in names if name in kwargs}
        return {"input_ids": input_ids[:, seen:], "past_key_values": past_key_values, **passed}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: NSALlamaCache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
        compressed_only: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **of_loss: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the next tokens, and the loss of ``labels``.

        Args:
            input_ids: ``[B, N]``.
            attention_mask: ``[B, N]``, 1 for tokens and 0 for padding behind them; without padding
                where there is a cache.
            past_key_values: earlier tokens, to which these are appended; as it was after an error.
                ``cache`` is its name from Transformers 5.24 on.
            labels: ``[B, N]`` tokens, -100 for those without a loss; shifted here.
            use_cache: start a cache where there is none.
            logits_to_keep: last tokens whose logits are returned, 0 for all; or their places.
            compressed_only: ``[B]`` bool: see :class:`sparsek_backend.nn.NativeSparseAttention`.
            return_dict: ``False`` for a tuple.
            of_loss: what the loss function takes, such as ``num_items_in_batch``.

        Raises:
            NotImplementedError: padding before tokens, packed sequences or embedded inputs, or
                attentions or hidden states as outputs.
            TypeError: ``past_key_values`` of another kind.
        """
        past_key_values = of_loss.pop("cache", past_key_values)
        if not isinstance(past_key_values, NSALlamaCache | None):
            raise TypeError(
                "past_key_values: expected those that a call with use_cache=True returned, got "
                f"{type(past_key_values).__name__}; leave it out in the first call"
            )
        for name in _INNER:
            if of_loss.pop(name, None):
                raise NotImplementedError(
                    f"{name}: native sparse attention in Transformers returns logits and loss "
                    "alone; register forward hooks on the layers"
                )
        for name in ("inputs_embeds", "position_ids", "cu_seq_lens_q"):
            if of_loss.pop(name, None) is not None:
                raise NotImplementedError(
                    f"{name}: native sparse attention in Transformers takes input_ids of one "
                    "sequence a row; pack sequences with sparsek_backend.nn.NativeSparseAttention"
                )
        if use_cache and past_key_values is None:
            past_key_values = NSALlamaCache(self.model.new_caches(*input_ids.shape))
        _check_mask(attention_mask, past_key_values is not None)
        caches = None if past_key_values is None else past_key_values.layers
        if past_key_values is not None:
            past_key_values.reserve(input_ids.shape[1])
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        with unchanged_on_error(caches or ()):
            logits = self.lm_head(self.model(input_ids, caches, compressed_only)[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **of_loss)
        found = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return found.to_tuple() if return_dict is False else found

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Write the folder, of a model under ``fully_shard`` too: all ranks call this then.

        The weights of a sharded model are gathered one after another; rank 0 writes, and the folder
        is complete when this returns.
        """
        if options.get("state_dict") is not None or not is_sharded(self):
            super().save_pretrained(save_directory, **options)
            return
        writes = dist.get_rank() == 0
        state = gathered(self, writes)
        try:
            if writes:
                super().save_pretrained(save_directory, state_dict=state, **options)
        finally:
            dist.barrier()


def _check_mask(attention_mask: torch.Tensor | None, cached: bool) -> None:
    if attention_mask is None or bool(attention_mask.all()):
        return
    behind = attention_mask.dim() == 2 and bool(
        (attention_mask[:, 1:] <= attention_mask[:, :-1]).all()
    )
    if cached or not behind:
        raise NotImplementedError(
            "attention_mask: native sparse attention takes no padding before tokens, and none with "
            "a cache; generate for prompts of one length at a time"
        )


AutoModelForCausalLM.register(NSALlamaHFConfig, NSALlamaForCausalLM, exist_ok=True)
