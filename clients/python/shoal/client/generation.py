"""What is added to a transformers causal language model so that it runs over remote blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from shoal.client.connection import SwarmConnection
from shoal.client.options import refuse_unsupported
from shoal.client.remote import RemoteCache
from shoal.client.session import InferenceSession, active_session
from shoal.client.streaming import fail_streamer, stream_in_thread
from shoal.client.turns import Turn
from shoal.wire.errors import InvalidRequest, TooLong, Unsupported


class RemoteGenerationMixin:
    """Stands before a transformers `...ForCausalLM` class in the order of base classes.

    `generate`, sampling, heads and norms are transformers' own. Options that cannot be honoured are refused by name
    before any call to a server.
    """

    takes_position_ids: ClassVar[bool]
    connection: SwarmConnection
    generation_config: GenerationConfig

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: RemoteCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **options: Any,
    ) -> Any:
        """Return transformers' output with logits `[rows, tokens, vocabulary]`; logits on padding mean nothing.

        A cache is kept, and must be closed, only with `use_cache=True` or one passed in.

        Raises:
            Unsupported: for an option that cannot be honoured; InvalidRequest: for ids out of the vocabulary.
        """
        cache = options.pop("past_key_values", cache)
        refuse_unsupported(options, "forward()")
        unknown = sorted(name for name, value in options.items() if value is not None and name not in _HARMLESS)
        if unknown:
            raise Unsupported(f"forward(): {', '.join(unknown)} is not known to this model; leave it out")
        if cache is not None and not isinstance(cache, RemoteCache):
            raise Unsupported(f"forward(): a {type(cache).__name__} cannot hold a remote session; leave the cache out")
        rows, columns = self._check_inputs(input_ids, inputs_embeds)
        kept = cache if cache is not None else RemoteCache(self.connection, None if use_cache else columns)
        given: dict[str, Any] = {
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            "logits_to_keep": logits_to_keep,
        }
        if self.takes_position_ids:
            given["position_ids"] = position_ids
        try:
            needed = logits_to_keep if isinstance(logits_to_keep, int) and labels is None else 0
            with kept.step(attention_mask, position_ids, input_ids, (rows, columns), needed):
                output = super().forward(  # type: ignore[misc]
                    input_ids=input_ids,
                    attention_mask=None,
                    cache=kept,
                    use_cache=True,
                    return_dict=True,
                    **given,
                )
        except BaseException:  # whatever it is, the session must not outlive the call
            kept.close()
            raise
        if cache is None and not use_cache:
            kept.close()
            output = type(output)(**{name: value for name, value in output.items() if name != "cache"})
        return output if return_dict is not False else output.to_tuple()

    def _check_inputs(self, ids: torch.Tensor | None, embeds: torch.Tensor | None) -> tuple[int, int]:
        if (ids is None) == (embeds is None):
            raise InvalidRequest("pass exactly one of input_ids and inputs_embeds")
        if embeds is not None:
            if embeds.dim() != 3 or embeds.shape[-1] != self.connection.hidden_size:
                raise InvalidRequest(
                    f"inputs_embeds must be [batch, tokens, {self.connection.hidden_size}], got {list(embeds.shape)}"
                )
            return embeds.shape[0], embeds.shape[1]
        assert ids is not None
        check_ids(ids, self.connection.model.family.vocab_size)
        return ids.shape[0], ids.shape[1]

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        session: InferenceSession | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as transformers does: same arguments, same ids.

        In a session (given, or of the `with` block around the call) the ids are compared with what the session was
        fed: an equal beginning is not fed again, and the result is always that of a fresh run on the same ids.
        Without ids the session goes on where it was, and only the new ids are returned.

        Raises:
            Unsupported: for an option that cannot be honoured, by name, before any call; or after a fork().
            TooLong: if prompt and new tokens are more than the model or the session takes.
        """
        self.connection.check_process()
        self._refuse(generation_config, kwargs)
        turn = Turn(self.connection, session if session is not None else active_session(self.connection))
        inputs = turn.begin(inputs, kwargs)
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        self._check_prompt(prompt, generation_config, kwargs, turn.session)
        if isinstance(prompt, torch.Tensor):
            turn.reuse(prompt, kwargs.get("attention_mask"))
        self._running.append(turn)
        try:
            output = super().generate(inputs, generation_config=generation_config, **kwargs)  # type: ignore[misc]
        except BaseException as error:  # whatever it is, the reader of the stream must hear of it
            fail_streamer(kwargs.get("streamer"), error)
            raise
        finally:
            self._running.remove(turn)
            turn.close()
        return turn.end(output)

    def stream(self, inputs: torch.Tensor | None = None, **kwargs: Any) -> Iterator[torch.Tensor]:
        """Generate and yield the new ids, one `[rows]` tensor per step.

        An error of the generation is raised here; leaving the loop early ends the generation.
        """
        given = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
        session = kwargs.pop("session", None) or active_session(self.connection)

        def run(streamer: Any, stop: threading.Event) -> None:
            criteria = StoppingCriteriaList([*given, _StopWhen(stop)])
            self.generate(inputs, session=session, streamer=streamer, stopping_criteria=criteria, **kwargs)

        stream = stream_in_thread(run)
        with closing(stream):  # type: ignore[type-var]
            yield from stream

    def inference_session(self, *, max_tokens: int | None = None, batch_size: int = 1) -> InferenceSession:
        """Open a session over all blocks for steps of hidden states `[batch_size, tokens, hidden]`.

        Raises:
            TooLong, NoRoute, CacheFull, ...: as `SwarmConnection.open_session`.
        """
        session = self.connection.open_session(rows=batch_size, max_tokens=max_tokens)
        session.embed = self._embed
        return session

    @torch.no_grad()
    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        check_ids(ids, self.connection.model.family.vocab_size)
        hidden: torch.Tensor = self.get_input_embeddings()(ids)  # type: ignore[attr-defined]
        after = getattr(self.base_model, "word_embeddings_layernorm", None)  # type: ignore[attr-defined]
        return hidden if after is None else after(hidden)

    @property
    def _running(self) -> list[Turn]:
        """The running `generate` calls of this thread, innermost last."""
        local: threading.local = self.__dict__.setdefault("_local", threading.local())
        if not hasattr(local, "calls"):
            local.calls = []
        calls: list[Turn] = local.calls
        return calls

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *rest: Any, **more: Any
    ) -> None:
        """Give transformers our cache in place of its own, sized for the whole generation."""
        if model_kwargs.get("cache") is not None:
            raise Unsupported("generate(): cache is not supported; leave it out")
        if generation_config.use_cache is False:
            return
        max_cache_length = more.get("max_cache_length", rest[-1] if rest else generation_config.max_length)
        # Drafts that are looked up may reach beyond the end before they are cut.
        drafted = generation_config.prompt_lookup_num_tokens or 0
        limit = self.connection.model.family.max_positions
        longest = max_cache_length + drafted
        model_kwargs["cache"] = self._running[-1].cache(longest if limit is None else min(longest, limit))

    def _refuse(self, generation_config: GenerationConfig | None, kwargs: Mapping[str, Any]) -> None:
        settings = [
            self.generation_config.to_dict(),
            generation_config.to_dict() if generation_config else {},
            kwargs,
        ]
        effective: dict[str, Any] = {}
        for options in settings:
            effective.update((name, value) for name, value in options.items() if value is not None)
        refuse_unsupported(effective, "generate()")
        for name in ("cache", "past_key_values"):
            if kwargs.get(name) is not None:
                raise Unsupported(f"generate(): {name} is not supported; leave it out", option=name)

    def _check_prompt(
        self,
        prompt: Any,
        generation_config: GenerationConfig | None,
        kwargs: Mapping[str, Any],
        session: InferenceSession | None,
    ) -> None:
        if not isinstance(prompt, torch.Tensor):
            return
        check_ids(prompt, self.connection.model.family.vocab_size)
        config = generation_config or self.generation_config
        new = kwargs.get("max_new_tokens", config.max_new_tokens)
        limits = (self.connection.model.family.max_positions, session.max_tokens if session else None)
        limit = min((bound for bound in limits if bound is not None), default=None)
        total = prompt.shape[1] + new if new is not None else max(prompt.shape[1], kwargs.get("max_length") or 0)
        if limit is not None and total > limit:
            raise TooLong(
                f"{prompt.shape[1]} prompt tokens and {total - prompt.shape[1]} new ones are more than the {limit} "
                f"that the {'session' if session else 'model'} takes: shorten the prompt or ask for fewer new tokens",
                prefix=str(prompt.shape[1]),
                new=str(total - prompt.shape[1]),
                limit=str(limit),
            )
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask.ne(0).any(dim=1).all()):
            raise InvalidRequest("a row of attention_mask is all zeros: each row needs at least one token")
        if mask is None:
            _check_padding(prompt, config, kwargs)


# Passed by transformers' own generation loop; they change nothing here.
_HARMLESS = frozenset({"token_type_ids", "cache_position", "num_items_in_batch"})


class _StopWhen(StoppingCriteria):  # type: ignore[misc]
    """Ends a generation when an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._event.is_set(), dtype=torch.bool, device=input_ids.device)


def check_ids(ids: torch.Tensor, vocab_size: int) -> None:
    """Refuse ids that the embedding does not have.

    Raises:
        InvalidRequest: naming the first bad id and where it is.
    """
    if ids.dim() != 2 or ids.numel() == 0 or ids.is_floating_point():
        raise InvalidRequest(f"input_ids must be whole numbers [batch, tokens], got {list(ids.shape)} of {ids.dtype}")
    bad = (ids < 0) | (ids >= vocab_size)
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise InvalidRequest(
            f"input id {int(ids[row, column])} at row {row}, column {column} is out of the vocabulary "
            f"of {vocab_size}: use the tokenizer of this model"
        )


def _check_padding(prompt: torch.Tensor, config: GenerationConfig, kwargs: Mapping[str, Any]) -> None:
    """Refuse a batch that looks padded when transformers would take the padding for text."""
    pad = kwargs.get("pad_token_id", config.pad_token_id)
    ends = kwargs.get("eos_token_id", config.eos_token_id)
    ends = ends if isinstance(ends, (list, tuple)) else [ends]
    if prompt.shape[0] > 1 and pad is not None and pad in ends and bool((prompt[:, 0] == pad).any()):
        raise InvalidRequest(
            f"a row begins with id {pad}, which is both pad and end of text: "
            "pass attention_mask to tell which one is meant"
        )
