"""Which options of `generate()` and `forward()` Shoal honours; all others are refused by name before any call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.wire.errors import Unsupported

# Option -> (values that mean "not used", why it is refused).
_DRAFTS = "drafts of this kind need the inside of the model"
_INSIDE = "the blocks run on servers, which send hidden states of the last block only"
_CACHE = "the cache lies on the servers"
_COMPILE = "the blocks run on servers"
_REMOTE = "code from the hub is not run"
UNSUPPORTED_OPTIONS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_beam_groups": ((None, 1), _REMOTE),
    "diversity_penalty": ((None, 0.0), _REMOTE),
    "constraints": ((None,), _REMOTE),
    "force_words_ids": ((None,), _REMOTE),
    "penalty_alpha": ((None, 0.0), _REMOTE),
    "dola_layers": ((None,), _INSIDE),
    "low_memory": ((None, False), _REMOTE),
    "assistant_early_exit": ((None,), _DRAFTS),
    "speculation_type": ((None,), _DRAFTS),
    "use_mtp": ((None, False), _DRAFTS),
    "is_assistant": ((None, False), _DRAFTS),
    "output_attentions": ((None, False), _INSIDE),
    "output_hidden_states": ((None, False), _INSIDE),
    "output_router_logits": ((None, False), _INSIDE),
    "cache_implementation": ((None,), _CACHE),
    "cache_config": ((None,), _CACHE),
    "max_cache_len": ((None,), _CACHE),
    "continuous_batching_config": ((None,), _CACHE),
    "compile_config": ((None,), _COMPILE),
    "token_healing": ((None, False), "it changes the prompt after it was checked"),
    "synced_gpus": ((None, False), "there is no process group"),
    "custom_generate": ((None,), _REMOTE),
    "trust_remote_code": ((None, False), _REMOTE),
}


def refuse_unsupported(options: Mapping[str, Any], where: str) -> None:
    """Refuse the first option that is set and cannot be honoured.

    Raises:
        Unsupported: naming the option, its value and the reason.
    """
    for name, (unused, why) in UNSUPPORTED_OPTIONS.items():
        value = options.get(name)
        plain = value is None or isinstance(value, (bool, int, float, str))
        if not (plain and value in unused):
            shown = repr(value) if plain else f"<{type(value).__name__}>"
            raise Unsupported(f"{where}: {name}={shown} is not supported ({why}); leave it out", option=name)
