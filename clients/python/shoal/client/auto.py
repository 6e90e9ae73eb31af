"""Makes a distributed model: transformers' class for the config, ends loaded, blocks remote.

The model's files come from a folder or from the hub; of the weights only the shards with the ends are fetched.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from shoal.client.config import SequenceManagerConfig
from shoal.client.connection import SwarmConnection
from shoal.client.generation import RemoteGenerationMixin
from shoal.client.heads import CombinedHead
from shoal.client.remote import RemoteSequential
from shoal.models.checkpoint import Checkpoint
from shoal.models.families import AttentionKind, Family
from shoal.models.files import GENERATION_CONFIG_FILE, HubOptions
from shoal.models.prefixes import model_prefix
from shoal.models.sources import open_model
from shoal.wire.errors import NotFound


class AutoDistributedModelForCausalLM:
    """A causal language model whose blocks run on the servers of a swarm. Made by `from_pretrained` only."""

    def __init__(self) -> None:
        raise TypeError("use AutoDistributedModelForCausalLM.from_pretrained(...)")

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        swarm: str | None = None,
        api_key: str | None = None,
        initial_peers: list[str] | None = None,
        config: SequenceManagerConfig | None = None,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        allow_pickle: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Load embeddings, norm and head of a model and join a swarm that serves its blocks.

        Args:
            model: folder with `config.json` and safetensors, or `OWNER/NAME` of the hub.
            swarm: `shoal://HOST:PORT#SHA256`; by default `$SHOAL_SWARM`, else the file that `shoal up` wrote.
            api_key: by default `$SHOAL_API_KEY`, else that file's.
            initial_peers: nodes to join the DHT by, `/ip4/ADDRESS/tcp/PORT/p2p/ID`, beside those that registry and file
                name; needed only while the registry is away and nothing is known of the DHT.
            config: limits and preferences of routes and sessions.
            revision: branch, tag or commit of the hub's repository; the commit is resolved once and then kept.
            token: token of the hub, for private repositories; by default HF_TOKEN or the login of `hf auth login`.
            cache_dir: where files of the hub are kept; by default the cache that all programs of the hub share.
            allow_pickle: read weights that are stored as pickles only, through torch's weights-only loader.
            dtype: element type; by default the one that the swarm serves.

        Raises:
            Unsupported: if the model family, or one of the other arguments, is not supported.
            NotFound: if folder, repository, revision, file or tensor is missing.
            NotAuthenticated, NotPermitted: if the hub wants a token, or another one; or the swarm another key.
            Unavailable, Corrupted: if the hub cannot be reached, or its files arrive damaged.
            UnknownModel: if the swarm does not serve the model.
        """
        hub = HubOptions(revision, token, None if cache_dir is None else Path(cache_dir))
        checkpoint = open_model(model, hub, allow_pickle=allow_pickle)
        connection = SwarmConnection.join(
            checkpoint.family,
            model_prefix(checkpoint.source, checkpoint.config),
            swarm=swarm,
            api_key=api_key,
            dtype=dtype,
            config=config,
            initial_peers=initial_peers or (),
        )
        try:
            return build_model(checkpoint, connection)
        except BaseException:  # an interrupt too: nobody else would close the connection
            connection.close()
            raise


def build_model(checkpoint: Checkpoint, connection: SwarmConnection) -> Any:
    """Build the client's model: all but the blocks, loaded in the connection's element type.

    Raises:
        ShoalError: if a file cannot be fetched or a tensor cannot be read.
    """
    family = checkpoint.family
    cls = distributed_class(family)
    config = checkpoint.config
    config.dtype = connection.dtype
    blocks, config.num_hidden_layers = config.num_hidden_layers, 0
    try:
        with torch.device("meta"):
            model = cls(config)
    finally:
        config.num_hidden_layers = blocks
    parent, _, name = family.blocks_path.rpartition(".")
    remote = RemoteSequential(connection, gives_tuple=family.row.attention is AttentionKind.ALIBI)
    base = model.get_submodule(parent)
    setattr(base, name, torch.nn.ModuleList([remote]))
    if hasattr(base, "rotary_emb"):
        base.rotary_emb = _NoRotary()
    model.set_output_embeddings(CombinedHead(model.get_output_embeddings()))
    _fill(model, {name: tensor.to(connection.dtype) for name, tensor in checkpoint.read_ends().items()}, family)
    model.connection = connection
    model.checkpoint = checkpoint
    model.eval().requires_grad_(False)
    if checkpoint.files.has(GENERATION_CONFIG_FILE):
        checkpoint.files.fetch({GENERATION_CONFIG_FILE: ""})
        model.generation_config = GenerationConfig.from_pretrained(str(checkpoint.folder))
    return model


def distributed_class(family: Family) -> type:
    """Return the class `Distributed<Family>ForCausalLM`: transformers' own with `RemoteGenerationMixin` in front."""
    # Loads the list of all models, a third of the time that importing transformers takes: not before it is needed.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    base = MODEL_FOR_CAUSAL_LM_MAPPING[type(family.config)]
    base = base[0] if isinstance(base, tuple) else base
    fields = {
        "takes_position_ids": family.row.attention is AttentionKind.INTERFACE,
        "__module__": __name__,
        "__doc__": f"{base.__name__} whose blocks run on the servers of a swarm.",
        "main_input_name": base.main_input_name,
    }
    return type(f"Distributed{base.__name__}", (RemoteGenerationMixin, base), fields)


class _NoRotary(torch.nn.Module):
    """Stands where rotary tables are computed: the servers compute their own."""

    def forward(self, *_: Any, **__: Any) -> None:
        return None


def _fill(model: torch.nn.Module, ends: dict[str, torch.Tensor], family: Family) -> None:
    """Put every end tensor in its place, exactly once, and leave nothing on the meta device.

    Raises:
        NotFound: naming what stayed empty.
    """
    unexpected = model.load_state_dict(ends, strict=False, assign=True).unexpected_keys
    if family.tied:
        model.get_submodule(family.row.head.rpartition(".")[0]).weight = model.get_parameter(family.row.embedding)
    state = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in state if tensor.is_meta]
    if empty or unexpected:
        raise NotFound(f"ends of {family.name} do not fit the model: empty {empty}, without a place {unexpected}")
