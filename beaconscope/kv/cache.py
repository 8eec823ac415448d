"""A transformers cache that a policy compresses, and BeaconKV's."""

from __future__ import annotations

import copy
import dataclasses
import warnings
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from beaconscope.attention.rotary import Rotary
from beaconscope.attention.step import AttentionStep
from beaconscope.errors import BeaconScopeError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.layer import CompressedLayer, Observer, Rows
from beaconscope.kv.policies import BeaconKV, Full, Policy
from beaconscope.kv.ragged import RaggedLayer
from beaconscope.models.hooks import AttentionInputs, LayerCall, TappedCache, attention_modules, watch
from beaconscope.models.probe import LayerInfo
from beaconscope.models.tap import TappedModel, tap

_OTHER_MODEL = "this cache was made for another model; make one for the model that it is used with"


class CompressedCache(TappedCache):
    """A cache whose full-attention layers are compressed by a policy; sliding layers keep their window.

    Parameters
    ----------
    model
        The model that it is used with, plain or tapped; a plain one is tapped, which takes three short forward passes.
    policy
        What to evict.
    observer
        Told of every step and compression in the layers that it wants.
    token_kinds
        The kind of every token, uint8 [V] (:func:`~beaconscope.kv.kinds.token_kinds`), for a policy that needs them.
    max_length
        Most tokens of a text, prompt and new ones; the model's context by default. A layer whose sliding window is at
        least as long sees everything, and is compressed as a layer with full attention.

    Raises
    ------
    BeaconScopeError
        For a model that cannot be tapped, or whose layers all have shorter windows, so that there is nothing to
        compress; or a policy that works in replay only, or that needs pre-RoPE queries or kinds of tokens where they
        cannot be known.
    """

    def __init__(
        self,
        model: PreTrainedModel | TappedModel,
        policy: Policy,
        observer: Observer | None = None,
        token_kinds: Tensor | None = None,
        max_length: int | None = None,
    ) -> None:
        policy.check_live()
        if policy.needs_kinds and token_kinds is None:
            raise BeaconScopeError(
                f"{policy.name} has to know special tokens and punctuation; give the cache token_kinds"
            )
        tapped = model if isinstance(model, TappedModel) else tap(model)
        asked = getattr(tapped.model.generation_config, "cache_implementation", None)
        if asked not in (None, "hybrid"):  # which transformers itself passes over
            raise BeaconScopeError(
                f"the model's generation_config asks for a cache of its own ({asked}), which cannot be compressed; set "
                "model.generation_config.cache_implementation = None"
            )
        if policy.ragged and tapped.backend == "flash_attention_2":
            raise BeaconScopeError(
                f"flash_attention_2 cannot attend to heads that keep different numbers, as those of {policy.name} do; "
                "load the model with --attn sdpa"
            )
        self.policy = policy
        self.observer = observer
        self._info = tapped.layers
        self._backend = tapped.backend
        self._max_length = max_length or tapped.context
        self._rotary_limit = tapped.rotary_limit
        self._check_layers(type(tapped.model).__name__, max_length)
        self._rotary = [_rotary_for(policy, info, self._max_length) for info in self._info]
        # Weak, so that a copy of the cache is no copy of the model.
        self._modules = {layer: weakref.ref(module) for layer, module in attention_modules(tapped.model).items()}
        self._rows: list[Rows] = []
        self._called: int | None = None  # layer whose attention is being computed
        self._token_kinds = token_kinds
        self._kinds: Tensor | None = None  # of the tokens being fed, [B, T]
        self._prompt: int | None = None  # columns of the prompt, where somebody told
        self._asked = False  # for its length, since the last pass
        self._last_fed: Tensor | None = None  # ids of the last pass, [B, T]
        self._position_ids: Tensor | None = None  # of the last pass, [B or 1, T]
        super().__init__(layers=self._new_layers())
        self._model = weakref.ref(tapped.model)
        watch(tapped.model, self)

    def _check_layers(self, name: str, max_length: int | None) -> None:
        """Refuse a model in which nothing would be compressed, and lengths at which it would not be itself."""
        limit = self._rotary_limit
        if limit is not None and max_length is not None and max_length > limit:
            raise BeaconScopeError(
                f"past {limit} tokens {name} changes its rotary frequencies, which a cache cannot follow; give a "
                f"max_length of at most {limit}"
            )
        for info in self._info:
            if info.chunk is not None and info.is_bounded(self._max_length):
                raise BeaconScopeError(
                    f"layer {info.layer} of {name} attends in chunks of {info.chunk} tokens, and no cache here keeps "
                    f"those; give a max_length of at most {info.chunk}"
                )
        if self.policy.evicts and all(info.is_bounded(self._max_length) for info in self._info):
            widest = max(info.spec.window or 0 for info in self._info)
            raise BeaconScopeError(
                f"every layer of {name} has a sliding window, the widest of {widest} tokens, so there is nothing for "
                f"{self.policy.name} to compress; give a max_length of at most {widest} if no text is longer"
            )

    def _new_layers(self) -> list[Any]:
        kind = RaggedLayer if self.policy.ragged else CompressedLayer
        return [
            DynamicSlidingWindowLayer(sliding_window=info.spec.window)
            if info.spec.window is not None and info.is_bounded(self._max_length)
            else kind(info.layer, self.policy, self.observer)
            for info in self._info
        ]

    @property
    def compressed_layers(self) -> list[CompressedLayer]:
        """The layers that the policy compresses."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def sliding_layers(self) -> list[int]:
        """Layers with a sliding window shorter than a text may get, which keep their window and nothing else."""
        return [info.layer for info in self._info if not isinstance(self.layers[info.layer], CompressedLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes of all stored keys and values and of the positions beside them."""
        total = sum(layer.nbytes for layer in self.compressed_layers)
        for layer in self.layers:
            if not isinstance(layer, CompressedLayer):
                held = (getattr(layer, name, None) for name in ("keys", "values"))
                total += sum(part.numel() * part.element_size() for part in held if isinstance(part, Tensor))
        return total

    def kept_positions(self, layer: int, row: int = 0) -> Tensor:
        """Positions that a layer holds of one sequence of the batch, int64 [H, N], ascending.

        Where heads keep different numbers, those with fewer than N begin with -1.

        Raises
        ------
        BeaconScopeError
            For a sliding layer, which is not compressed, or a sequence that is not in the batch.
        """
        chosen = self.layers[layer]
        if not isinstance(chosen, CompressedLayer):
            raise BeaconScopeError(f"layer {layer} is a sliding layer, which is not compressed")
        for lane in chosen.lanes:
            if row in (range(lane.rows.size) if lane.rows.index is None else lane.rows.index.tolist()):
                return chosen.kept_positions(lane, row)
        raise BeaconScopeError(f"the cache holds no sequence {row}")

    def room(self) -> int:
        """Tokens that may be fed in one pass without changing what is kept; at least 1."""
        return min((layer.room() for layer in self.compressed_layers), default=1 << 30)

    def flush(self, layers: Collection[int] | None = None) -> None:
        """Let the policy observe all queries that wait in some layers, or in all."""
        for layer in self.compressed_layers:
            if layers is None or layer.layer in layers:
                layer.flush()

    def lanes_of(self, layer: int) -> list[Any]:
        """The lanes of a compressed layer, none for a sliding one."""
        chosen = self.layers[layer]
        return chosen.lanes if isinstance(chosen, CompressedLayer) else []

    @property
    def shared_layers(self) -> list[int]:
        """Compressed layers whose heads share one stored entry (latent attention), so that they keep one set."""
        return [
            layer.layer
            for layer in self.compressed_layers
            if layer.positions is not None and layer.positions.shape[1] != self._info[layer.layer].kv_heads
        ]

    def expect_prompt(self, columns: int) -> None:
        """Say, before the first pass, how many tokens the prompt has, padding included; else it is the first pass."""
        self._prompt = columns

    def fed(self, tokens: Tensor | None, position_ids: Tensor | None) -> None:
        """See :class:`~beaconscope.models.hooks.TappedCache`."""
        self._asked, self._last_fed, self._position_ids = False, tokens, position_ids
        if self._token_kinds is not None and tokens is not None:
            self._token_kinds = self._token_kinds.to(tokens.device)
            self._kinds = self._token_kinds[tokens]
        else:
            self._kinds = None

    def left_out(self, tokens: Tensor, position_ids: Tensor | None, other: bool) -> None:
        """See :class:`~beaconscope.models.hooks.TappedCache`.

        Where its rotary frequencies change, ``generate`` of some models drops the cache that it was given. It goes on
        with the whole text and a new cache, or (transformers 5.2) with the newest token alone.
        """
        asked, self._asked = self._asked, False
        limit, seen, count = self._rotary_limit, super().get_seq_length(), tokens.shape[1]
        if limit is None or other or seen > limit:
            return
        length = count if position_ids is None else int(position_ids[0, -1]) + 1
        if length <= limit:
            return
        last = self._last_fed
        if count < length:
            dropped = count == length - seen
        elif not seen or last is None:
            dropped = asked
        else:
            same = torch.equal(tokens[:, seen - last.shape[1] : seen], last)
            dropped = same and (asked or count == seen + 1)
        if dropped:
            raise BeaconScopeError(_past_switch(limit))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        self._asked = True
        return super().get_seq_length(layer_idx)

    def _positions(self, call: LayerCall) -> Tensor | None:
        """Return the positions of a pass, [B or 1, T], where known; not every model hands them to its layers."""
        given = self._position_ids if call.position_ids is None else call.position_ids
        return given if given is not None and given.dim() == 2 else None

    def begin(self, call: LayerCall) -> None:
        """See :class:`~beaconscope.models.hooks.TappedCache`."""
        known = self._modules.get(call.layer)
        if known is None or known() is not call.module:
            raise BeaconScopeError(_OTHER_MODEL)
        if call.layer == self._info[0].layer:
            layers: list[Any] = self.layers
            if len({layer.get_seq_length() for layer in layers}) > 1 or any(
                layer.interrupted for layer in self.compressed_layers
            ):
                raise BeaconScopeError(
                    "the last forward pass of this cache was cut short; call reset() before another one"
                )
        self._called = call.layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add new entries to a layer; see :meth:`beaconscope.kv.layer.CompressedLayer.update`."""
        if self._called != layer_idx:
            raise BeaconScopeError(_OTHER_MODEL)
        rows = sum(rows.size for rows in self._rows)
        if rows and key_states.shape[0] != rows:
            raise BeaconScopeError(
                f"the cache holds {rows} sequences and was given a batch of {key_states.shape[0]}; call reset() before "
                "another batch"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def mask_for(self, call: LayerCall, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        """See :class:`~beaconscope.models.hooks.TappedCache`."""
        layer = self.layers[call.layer]
        tokens = query.shape[2]
        if not isinstance(layer, CompressedLayer):
            return mask
        if not layer.lanes:
            if not self._rows:
                self._rows = _rows_by_length(self._positions(call), query.shape[0], tokens)
            self._check_length(call.layer, max(tokens - rows.padding for rows in self._rows))
            if layer is self.compressed_layers[0]:
                self._check_padding(mask, tokens, query.shape[0])
            heads = self._heads(call.layer, key, query.device)
            layer.begin(self._rows, replace(heads, prompt=self._prompt or tokens))
            return mask
        self._check_length(call.layer, max(lane.seen for lane in layer.lanes) + tokens)
        if layer is self.compressed_layers[0]:
            self._check_later(call, layer, mask, tokens)
        visible = layer.visible(tokens)
        if visible is not None and visible.shape[1] > 1:
            visible = visible.repeat_interleave(self._info[call.layer].group_size, dim=1)
        if visible is not None and self._backend == "flash_attention_2":
            if len(layer.lanes) > 1:
                raise BeaconScopeError(
                    "flash_attention_2 cannot attend to sequences of different lengths here; load the model with "
                    "--attn sdpa"
                )
            return None  # causal from the end, which is the same
        return visible

    def attended(self, call: LayerCall, attention: AttentionInputs) -> None:
        """See :class:`~beaconscope.models.hooks.TappedCache`."""
        layer = self.layers[call.layer]
        info = self._info[call.layer]
        b, _, t, d = attention.query.shape
        query = attention.query.view(b, info.kv_heads, info.group_size, t, d)
        if isinstance(layer, CompressedLayer):
            heads = self._heads(call.layer, attention.key, query.device)
            layer.absorb(query, attention.key, attention.value, heads, self._kinds)
            return
        if not self._rows:
            self._rows = _rows_by_length(self._positions(call), b, t)
        if self.observer is not None and self.observer.wants(call.layer):
            self._observe_sliding(call.layer, query, attention, layer)

    def _observe_sliding(self, layer: int, query: Tensor, attention: AttentionInputs, stored: Any) -> None:
        assert self.observer is not None
        info = self._info[layer]
        columns, t = stored.get_seq_length(), query.shape[3]
        for number, rows in enumerate(self._rows):
            seen = columns - rows.padding
            new, held = min(t, seen), min(attention.key.shape[2], seen)
            positions = torch.arange(seen - held, seen, device=query.device)
            step = AttentionStep(
                rows=rows.index,
                first_position=seen - new,
                query=rows.take(query)[:, :, :, t - new :],
                key=rows.take(attention.key)[:, :, -held:],
                value=rows.take(attention.value)[:, :, -held:],
                key_positions=positions.expand(rows.size, info.kv_heads, held),
                spec=info.spec,
            )
            self.observer.attended(layer, number, step)

    def _heads(self, layer: int, key: Tensor, device: torch.device) -> HeadInfo:
        info = self._info[layer]
        stored: Any = self.layers[layer]
        return HeadInfo(
            layer=layer,
            kv_heads=tuple(range(info.kv_heads)),
            rows=key.shape[0],
            group_size=info.group_size,
            size=info.key_size,
            spec=info.spec.without_window(),
            device=device,
            rotary=self._rotary[layer],
            shared=stored.keys.shape[1] != key.shape[1],
            follow=self.observer is not None and self.observer.wants(layer),
        )

    def _check_length(self, layer: int, length: int) -> None:
        """Refuse a text that has become longer than the layer is known to be itself."""
        if self._rotary_limit is not None and length > self._rotary_limit:
            raise BeaconScopeError(_past_switch(self._rotary_limit))
        sees = self._info[layer].sees_all_of
        if sees is not None and length > sees:
            what = "a sliding window" if self._info[layer].chunk is None else "chunks"
            raise BeaconScopeError(
                f"the text is longer than max_length ({self._max_length}) said, and layer {layer}, which has {what} of "
                f"{sees} tokens, would see less than it should; give the cache the max_length of the longest text"
            )

    def _check_padding(self, mask: Tensor | None, tokens: int, batch: int) -> None:
        """Refuse a first pass whose padding the positions do not tell."""
        if mask is None:
            if any(rows.padding for rows in self._rows):
                raise BeaconScopeError(
                    "position_ids speak of padding and the attention mask of none; pass both, or neither"
                )
            return
        seen = _real(mask, tokens).expand(batch, tokens)
        column = torch.arange(tokens, device=seen.device)
        if not all(bool((rows.take(seen) == (column >= rows.padding)).all()) for rows in self._rows):
            raise BeaconScopeError(
                "only padding on the left, with position_ids that count from each prompt's first token, can be "
                "compressed; set tokenizer.padding_side = 'left' (generate makes such position_ids)"
            )

    def _check_later(self, call: LayerCall, layer: CompressedLayer, mask: Tensor | None, tokens: int) -> None:
        """Refuse padding among tokens that are fed onto a cache, and positions that do not follow on."""
        if tokens > 1 and mask is not None and not bool(_real(mask, tokens).all()):
            raise BeaconScopeError(
                "padding after the first pass cannot be compressed; feed turns of equal length, or one at a time"
            )
        given = self._positions(call)
        # A look at the numbers would make a GPU wait at every token.
        if given is None or (tokens == 1 and given.device.type != "cpu"):
            return
        for lane in layer.lanes:
            ends = given[:, -1] if given.shape[0] == 1 else lane.rows.take(given)[:, -1]
            if not bool((ends == lane.seen + tokens - 1).all()):
                raise BeaconScopeError(
                    f"position_ids end at {int(ends[0])} where the cache, which has seen {lane.seen} tokens, expects "
                    f"{lane.seen + tokens - 1}; go on counting where the last pass ended, or call reset() before "
                    "another text"
                )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences for beam search."""
        self._refuse_lanes()
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._count_rows(len(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some sequences."""
        self._refuse_lanes()
        super().batch_select_indices(indices)
        self._count_rows(len(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._refuse_lanes()
        super().batch_repeat_interleave(repeats)
        self._count_rows(sum(rows.size for rows in self._rows) * repeats)

    def _refuse_lanes(self) -> None:
        if len(self._rows) > 1:
            raise BeaconScopeError(
                "a batch of prompts of different lengths cannot be reordered; give prompts one at a time"
            )

    def _count_rows(self, size: int) -> None:
        self._rows = [Rows(None, size, rows.padding) for rows in self._rows]

    def reset(self) -> None:
        """Forget everything, for another generation."""
        self._rows = []
        self._called = None
        self._kinds = self._prompt = self._last_fed = self._position_ids = None
        self._asked = False
        self.layers = self._new_layers()

    @property
    def is_croppable(self) -> bool:
        """Whether a rollback is possible: never."""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        model = self._model()
        if model is not None:
            watch(model, twin)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BeaconScopeError(
            "a compressed cache belongs to a model of its process and cannot be pickled or saved; make one where it is "
            "needed (copy.deepcopy works)"
        )


class BeaconCache(CompressedCache):
    """BeaconKV's cache: ``model.generate(..., past_key_values=BeaconCache(model, budget=1024))``.

    Parameters
    ----------
    model
        The model that it is used with.
    max_length
        Most tokens of a text, prompt and new ones; the model's context by default. A layer whose sliding window is at
        least as long sees everything, and is compressed as a layer with full attention.
    **options
        Fields of :class:`~beaconscope.kv.policies.BeaconKV`.

    Raises
    ------
    BeaconScopeError
        For options out of their range, or a model that cannot be tapped or has nothing to compress.

    Warns
    -----
    UserWarning
        Where some layers have a sliding window, so that they are not compressed.
    """

    def __init__(self, model: PreTrainedModel | TappedModel, *, max_length: int | None = None, **options: Any) -> None:
        known = {field.name for field in dataclasses.fields(BeaconKV)}
        unknown = sorted(set(options) - known)
        if unknown:
            names = ", ".join(sorted({*known, "max_length"}))
            raise BeaconScopeError(f"BeaconCache has no option {unknown[0]!r}; it has {names}")
        super().__init__(model, BeaconKV(**options), max_length=max_length)
        if self.sliding_layers:
            warnings.warn(sliding_note(self._info, self._max_length), stacklevel=2)


def sliding_note(layers: Sequence[LayerInfo], length: int | None) -> str:
    """Return what to know of the layers whose sliding window is shorter than a text of ``length`` tokens."""
    sliding = [info for info in layers if info.is_bounded(length)]
    windows = sorted({info.spec.window for info in sliding if info.spec.window is not None})
    return (
        f"{len(sliding)} of {len(layers)} layers have a sliding window ({', '.join(map(str, windows))} tokens) and "
        f"keep just that; the other {len(layers) - len(sliding)} are compressed."
    )


def _past_switch(limit: int) -> str:
    return (
        f"past {limit} tokens this model changes its rotary frequencies and starts again without its cache; keep "
        f"prompt and new tokens within {limit}"
    )


def _real(mask: Tensor, tokens: int) -> Tensor:
    """Which of the newest ``tokens`` columns of a mask are no padding, bool [B or 1, T]."""
    seen = mask[:, 0, -1, -tokens:] if mask.dim() == 4 else mask[:, -tokens:]
    return seen >= 0 if seen.is_floating_point() else seen.bool()  # an additive mask is 0 where a token is seen


def _rotary_for(policy: Policy, info: LayerInfo, length: int | None) -> Rotary:
    if info.rotary is not None:
        return info.rotary
    if policy.needs_rotary and not info.is_bounded(length):
        remedy = "give --query-space post-rope" if isinstance(policy, BeaconKV | Full) else "give another --cache"
        raise BeaconScopeError(f"{info.rotary_problem}; {remedy}")
    return Rotary.none(info.key_size)


def _rows_by_length(position_ids: Tensor | None, batch: int, tokens: int) -> list[Rows]:
    """Group the sequences of a first pass by their padding, which their last position tells."""
    if position_ids is None:
        return [Rows(None, batch, 0)]
    ends = position_ids.expand(batch, -1)[:, -1].tolist()
    padding = [tokens - 1 - int(end) for end in ends]
    if min(padding) < 0:
        raise BeaconScopeError(
            f"position_ids end at {int(max(ends))} in a first pass of {tokens} tokens; they have to count from each "
            "prompt's first token"
        )
    if len(set(padding)) == 1:
        return [Rows(None, batch, padding[0])]
    return [
        Rows(
            torch.tensor([row for row in range(batch) if padding[row] == size], device=position_ids.device),
            padding.count(size),
            size,
        )
        for size in sorted(set(padding))
    ]
