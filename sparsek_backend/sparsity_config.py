"""The settings of one engine: their fields, and what queries attend by them in each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sparsek_backend.field_types import Blocks, Count, Layers, Pairs, Positive
from sparsek_kernels.paged.policy import Growth, SelectionPolicy, StepPolicy

_MODES = ["auto", "dense", "sink_window", "block_topk", "pattern", "infllm", "seer", "nsa"]


def _known_mode(value: str) -> str:
    if value not in _MODES:
        raise ValueError(f"expected one of {', '.join(_MODES)}")
    return value


Mode = Annotated[str, AfterValidator(_known_mode)]
Phase = Literal["both", "prefill", "decode"]

DECODE_TOKENS = 2048
"""Tokens that a decoded token selects by default."""

DENSE_LAST, LAST_PART = 1024, 16
"""By default so many tokens of a prompt's end are dense, and no more than this part of it."""

_BY_RECORDS = ("auto", "block_topk", "pattern")
"""Modes whose single tokens choose pairs of keys; in others they choose whole blocks."""


class SparsityConfig(BaseModel):
    """The settings of one engine.  Sizes are in tokens unless a field says otherwise.

    The texts of the fields are the table of docs/configuration.md.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    mode: Mode = "auto"
    """`block_topk`: sinks, window and what matters most between. `pattern`: the same, but prefills
    take their blocks from a learned file. `infllm`: the blocks that a model with a `sparse_config`
    was trained to select. `seer`: decoded tokens attend the blocks that SeerAttention-R's gates
    choose. `sink_window`: sinks and window only. `dense`: everything. `nsa`: what a natively sparse
    model's own weights say. `auto`: what the model's own config says, else `block_topk`."""
    num_sink: Count = 64
    """First tokens that every query sees. `block_topk` rounds up to whole blocks."""
    window_size: Positive = 512
    """Latest tokens that every query sees, its own included."""
    sel_block_size: Positive = 64
    """Tokens in a block, a multiple of 16. It must divide the KV page (64 tokens on a GPU, 128 on a
    CPU, or `--block-size`) or be a multiple of it."""
    top_k: Blocks = 96
    """Blocks that a prefill tile selects beyond sinks and window, per KV head. Without effect with
    `query_tile` 1 or `sparse_phase` `decode`."""
    top_k_deep: Blocks | None = Field(None, examples=[192])
    """Blocks that the deepest prefill tiles select: one more than `top_k` for every 8 blocks past
    32,768 tokens, up to as many. If left out, all select `top_k`. Without effect with `query_tile`
    1."""
    decode_tokens: Pairs = DECODE_TOKENS
    """Tokens that a decoded token selects, in pairs, per KV head, by records that pages keep of
    every 64 tokens; some of them are drawn, and stand for others too. Pages then have a multiple of
    64 tokens. Fewer make decoding faster. In mode `seer` it selects whole blocks of as many
    tokens."""
    dense_below: Count = 8192
    """Positions below this attend everything."""
    dense_last: Count | None = Field(None, examples=[1024])
    """Last tokens of a prompt that attend everything, whatever its chunks: its question sits there.
    If left out, a sixteenth of the prompt, from 64 to 1024. Without effect with `query_tile` 1."""
    dense_layers: Layers = 0
    """How many first layers attend everything, or a list of layer indices, counted from 0, a draft
    model's after the model's. Layers that both lack are refused."""
    query_tile: Positive = 64
    """Prefill queries that share one selection. 1 selects per token, as a decoded token does:
    slower, and independent of chunking."""
    sparse_phase: Phase = "both"
    """Which phase is sparse. `decode` leaves prompts dense: they keep their answers, and the first
    token comes no sooner. `prefill` leaves decoded tokens dense."""
    pattern: str | None = Field(None, examples=["pattern.safetensors"])
    """The file of mode `pattern`, which `sparsek patterns learn MODEL --prefill --out FILE` makes.
    Its blocks have `sel_block_size` tokens."""
    gates: str | None = Field(None, examples=["Qwen3-4B-AttnGates"])
    """The folder of the gates of mode `seer`, by default the model's own: `config.json` and
    `attn_gate_weights.pth` (or `.safetensors`)."""
    time_selection: bool = Field(False, examples=[True])
    """For measurements: every ten seconds one layer's prefill is timed, for `/metrics`. Its
    selection runs once more for that."""

    @property
    def selects_blocks(self) -> bool:
        """Whether queries attend blocks beyond sinks and window."""
        return self.mode not in ("auto", "dense", "sink_window", "nsa")

    @property
    def by_records(self) -> bool:
        """Whether tokens choose pairs of keys by records, which take pages of whole segments."""
        alone = self.sparse_phase != "prefill" or self.query_tile == 1
        return self.mode in _BY_RECORDS and alone

    def is_dense_layer(self, index: int) -> bool:
        """Whether the layer with this index attends everything.

        In mode ``nsa`` that is a layer which is not natively sparse, such as a draft model's.
        """
        if self.mode in ("dense", "nsa"):
            return True
        if isinstance(self.dense_layers, int):
            return index < self.dense_layers
        return index in self.dense_layers

    def _growth(self) -> Growth | None:
        """How many more blocks deep tiles choose, up to ``top_k_deep``."""
        if self.top_k_deep is None or self.top_k_deep == self.top_k or self.query_tile == 1:
            return None
        return Growth.by(self.top_k_deep - self.top_k, self.sel_block_size)

    def policy_for(self, index: int) -> StepPolicy:
        """Return what prompts and decoded tokens attend in the layer with this index.

        It has full attention; the model's own windows are not the settings' matter.
        """
        dense = SelectionPolicy(sel_block_size=self.sel_block_size)
        if self.is_dense_layer(index):
            return StepPolicy(dense, dense)
        window = SelectionPolicy(
            num_sink=self.num_sink, window_size=self.window_size, dense_below=self.dense_below
        )
        if self.mode == "sink_window":
            return StepPolicy(window, window)
        tiles = replace(
            window,
            top_k=self.top_k,
            sel_block_size=self.sel_block_size,
            dense_last=DENSE_LAST if self.dense_last is None else self.dense_last,
            last_part=LAST_PART if self.dense_last is None else 0,
            query_tile=self.query_tile,
            growth=self._growth(),
        )
        if self.mode in _BY_RECORDS:
            single = tiles.by_records(self.decode_tokens)
        else:
            size = self.sel_block_size
            single = tiles.per_token(max(self.decode_tokens // size, 1), size)
        if self.mode in ("infllm", "seer"):  # of single tokens; gates leave prompts dense
            return StepPolicy(dense if self.mode == "seer" else single, single)
        if self.sparse_phase == "decode":
            return StepPolicy(dense, single)
        prefill = single if self.query_tile == 1 else tiles
        return StepPolicy(prefill, dense if self.sparse_phase == "prefill" else single)


FIELD_NAMES = tuple(SparsityConfig.model_fields)
FIELDS_OF_MODE: dict[str, frozenset[str]] = {
    "dense": frozenset({"mode"}),
    "nsa": frozenset({"mode"}),
    "infllm": frozenset({"mode", "dense_layers", "time_selection"}),
    "seer": frozenset(
        {"mode", "gates", "num_sink", "window_size", "decode_tokens", "dense_below", "dense_layers"}
    ),
    "sink_window": frozenset({"mode", "num_sink", "window_size", "dense_below", "dense_layers"}),
    "block_topk": frozenset(FIELD_NAMES) - {"pattern", "gates"},
    "pattern": frozenset(FIELD_NAMES) - {"gates", "top_k_deep"},
}
"""The settings that each mode heeds."""


def register_mode(name: str) -> None:
    """Let the setting ``mode`` take another name, with the fields of ``block_topk``.

    Single tokens choose whole blocks in it.  Its indexers come from whoever registers it
    (``vllm_backend/sparsek/selection.py``).
    """
    if name not in _MODES:
        _MODES.append(name)
        FIELDS_OF_MODE[name] = FIELDS_OF_MODE["block_topk"]
