"""Model families that Shoal can cut into blocks, and what is known about one model from its config alone.

A family whose attention goes through transformers' attention interface is one row of `_ROWS`. Anything else,
and any config option that would change numbers without being honoured, is refused by name before a weight is
read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shoal.wire.errors import Unsupported


class AttentionKind(StrEnum):
    """How a family's layers reach attention."""

    INTERFACE = "interface"
    ALIBI = "alibi"


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """What all models of a family share. Tensor names are those of transformers' causal language model."""

    model_type: str
    attention: AttentionKind
    base_prefix: str
    blocks_path: str
    layer_class: str
    rotary_class: str | None
    embedding: str
    other_ends: tuple[str, ...]
    head: str
    max_positions_field: str | None
    numeric_fields: tuple[str, ...]
    required: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One model: its family's row and the sizes in its config.

    `max_positions` is None where the architecture sets no limit. `config` is transformers' config object.
    """

    row: FamilyRow
    num_blocks: int
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int | None
    tied: bool
    config: Any = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """Transformers' `model_type`."""
        return self.row.model_type

    @property
    def blocks_path(self) -> str:
        """Attribute path of the block list in the causal language model, for example `model.layers`."""
        return self.row.blocks_path

    def block_prefix(self, block: int) -> str:
        """Return what the names of a block's tensors start with, for example `model.layers.3.`."""
        return f"{self.row.blocks_path}.{block}."


_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_ROWS = (
    FamilyRow(
        model_type="llama",
        attention=AttentionKind.INTERFACE,
        base_prefix="model.",
        blocks_path="model.layers",
        layer_class="transformers.models.llama.modeling_llama.LlamaDecoderLayer",
        rotary_class="transformers.models.llama.modeling_llama.LlamaRotaryEmbedding",
        embedding="model.embed_tokens.weight",
        other_ends=("model.norm.weight",),
        head="lm_head.weight",
        max_positions_field="max_position_embeddings",
        numeric_fields=(
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "hidden_act",
            "rms_norm_eps",
            "max_position_embeddings",
            "rope_parameters",
            "attention_bias",
            "mlp_bias",
            "tie_word_embeddings",
        ),
    ),
    FamilyRow(
        model_type="bloom",
        attention=AttentionKind.ALIBI,
        base_prefix="transformer.",
        blocks_path="transformer.h",
        layer_class="transformers.models.bloom.modeling_bloom.BloomBlock",
        rotary_class=None,
        embedding="transformer.word_embeddings.weight",
        other_ends=(
            "transformer.word_embeddings_layernorm.weight",
            "transformer.word_embeddings_layernorm.bias",
            "transformer.ln_f.weight",
            "transformer.ln_f.bias",
        ),
        head="lm_head.weight",
        max_positions_field=None,
        numeric_fields=(
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "layer_norm_epsilon",
            "apply_residual_connection_post_layernorm",
            "tie_word_embeddings",
        ),
        required=(("slow_but_exact", False),),
    ),
)

# Options of any family that change numbers and that nothing here honours yet; None and False are harmless.
_REFUSED_WHEN_SET = (
    "quantization_config",
    "is_encoder_decoder",
    "add_cross_attention",
    "output_attentions",
    # Here every layer sees, and the cache keeps, all tokens before it.
    "sliding_window",
    "attention_chunk_size",
)
_FULL_ATTENTION = "full_attention"


def supported_families() -> tuple[str, ...]:
    """Return the `model_type` of each supported family."""
    return tuple(row.model_type for row in _ROWS)


def check_model_type(model_type: object) -> None:
    """Refuse a `model_type` that is not supported.

    Raises:
        Unsupported: naming it and the supported ones.
    """
    _row_of(model_type)


def describe(config: Any) -> Family:
    """Find the family of a transformers config and the sizes of the model.

    Raises:
        Unsupported: for a family or an option that is not supported, by name.
    """
    row = _row_of(getattr(config, "model_type", None))
    _check_options(row, config)
    heads = int(config.num_attention_heads)
    limit = getattr(config, row.max_positions_field) if row.max_positions_field else None
    return Family(
        row=row,
        num_blocks=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        max_positions=None if limit is None else int(limit),
        tied=bool(config.tie_word_embeddings),
        config=config,
    )


def _row_of(model_type: object) -> FamilyRow:
    for row in _ROWS:
        if row.model_type == model_type:
            return row
    raise Unsupported(f"model family {model_type!r} is not supported; supported are {', '.join(supported_families())}")


def _check_options(row: FamilyRow, config: Any) -> None:
    for option in _REFUSED_WHEN_SET:
        if getattr(config, option, None):
            raise Unsupported(f"config option {option} is not supported for {row.model_type}; use a model without it")
    for kind in getattr(config, "layer_types", None) or ():
        if kind != _FULL_ATTENTION:
            raise Unsupported(
                f"config option layer_types has {kind!r}, which is not supported for {row.model_type}, only "
                f"{_FULL_ATTENTION!r}"
            )
    for option, wanted in row.required:
        value = getattr(config, option, wanted)
        if value != wanted:
            raise Unsupported(
                f"config option {option}={value!r} is not supported for {row.model_type}, only {wanted!r}"
            )
    rope = getattr(config, "rope_parameters", None)
    rope_type = (rope or {}).get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        # The others change the table with the longest sequence of a batch: one session would change another.
        raise Unsupported(f"config option rope_type={rope_type!r} is not supported, only {', '.join(_ROPE_TYPES)}")
