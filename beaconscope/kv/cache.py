"""A transformers cache that a policy compresses, and BeaconKV's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.layer import CompressedLayer, Observer, Rows
from beaconscope.kv.policies import BeaconKV, Policy
from beaconscope.kv.rotary import Rotary
from beaconscope.kv.step import AttentionStep
from beaconscope.models.tap import AttentionInputs, LayerCall, LayerInfo, TappedCache, TappedModel, tap


class CompressedCache(TappedCache):
    """A cache whose full-attention layers are compressed by a policy; sliding layers keep the cache of their own.

    Parameters
    ----------
    model
        The model that it is used with, plain or tapped; a plain one is tapped.
    policy
        What to evict.
    observer
        Told of every step and compression in the layers that it wants.

    Raises
    ------
    BeaconScopeError
        For a model that cannot be tapped, or a policy that needs pre-RoPE queries where they cannot be known.
    """

    def __init__(self, model: PreTrainedModel | TappedModel, policy: Policy, observer: Observer | None = None) -> None:
        tapped = model if isinstance(model, TappedModel) else tap(model)
        self.policy = policy
        self.observer = observer
        self._info = tapped.layers
        self._config = tapped.model.config
        self._backend = tapped.backend
        self._rotary = [_rotary_for(policy, info) for info in self._info]
        self._rows: list[Rows] = []
        super().__init__(layers=self._new_layers())

    def _new_layers(self) -> list[Any]:
        theirs = DynamicCache(config=self._config).layers
        layers: list[Any] = []
        for info, layer in zip(self._info, theirs, strict=True):
            if getattr(layer, "is_sliding", False):
                layers.append(layer)
            elif hasattr(layer, "keys"):
                layers.append(CompressedLayer(info.layer, self.policy, self.observer))
            else:
                raise BeaconScopeError(
                    f"layer {info.layer} caches no keys and values ({type(layer).__name__}), which cannot be compressed"
                )
        return layers

    @property
    def compressed_layers(self) -> list[CompressedLayer]:
        """The layers that the policy compresses."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes of all stored keys and values and of the positions beside them."""
        held = [
            tensor
            for layer in self.layers
            for tensor in (getattr(layer, name, None) for name in ("keys", "values", "positions"))
            if isinstance(tensor, Tensor)
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def kept_positions(self, layer: int, row: int = 0) -> Tensor:
        """Positions that a layer holds of one sequence of the batch, int64 [H, N], ascending.

        Raises
        ------
        BeaconScopeError
            For a sliding layer, which is not compressed.
        """
        chosen = self.layers[layer]
        if not isinstance(chosen, CompressedLayer):
            raise BeaconScopeError(f"layer {layer} is a sliding layer, which is not compressed")
        for lane in chosen.lanes:
            if lane.rows.index is None or bool((lane.rows.index == row).any()):
                assert chosen.positions is not None
                return chosen.positions[row, :, : lane.count]
        raise BeaconScopeError(f"the cache holds no sequence {row}")

    def room(self) -> int:
        """Tokens that may be fed in one pass without changing what is kept; at least 1."""
        return min((layer.room() for layer in self.compressed_layers), default=1 << 30)

    def flush(self) -> None:
        """Let the policy observe all queries that wait."""
        for layer in self.compressed_layers:
            layer.flush()

    def lanes_of(self, layer: int) -> list[Any]:
        """The lanes of a compressed layer, none for a sliding one."""
        chosen = self.layers[layer]
        return chosen.lanes if isinstance(chosen, CompressedLayer) else []

    @property
    def rows(self) -> list[Rows]:
        """The sequences of the batch by their length, as the first pass found them."""
        return self._rows

    def begin(self, call: LayerCall) -> None:
        """See :class:`~beaconscope.models.tap.TappedCache`."""
        layer = self.layers[call.layer]
        if isinstance(layer, CompressedLayer) and layer._incoming is not None:
            raise BeaconScopeError("the last forward pass of this cache was cut short; call reset() before another one")

    def mask_for(self, call: LayerCall, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        """See :class:`~beaconscope.models.tap.TappedCache`."""
        layer = self.layers[call.layer]
        tokens = query.shape[2]
        if not isinstance(layer, CompressedLayer):
            return mask
        if not layer.lanes:
            if not self._rows:
                self._rows = _rows_by_length(call, query.shape[0], tokens)
            self._check_padding(mask, tokens, query.device)
            layer.begin(self._rows, self._heads(call.layer, key, query.device))
            return mask
        if tokens > 1 and mask is not None and mask.dim() == 4:
            self._check_later(mask, tokens)
        visible = layer.visible(tokens)
        if visible is not None and self._backend == "flash_attention_2":
            if len(layer.lanes) > 1:
                raise BeaconScopeError(
                    "flash_attention_2 cannot attend to sequences of different lengths here; load the model with "
                    "--attn sdpa"
                )
            return None  # causal from the end, which is the same
        return visible

    def attended(self, call: LayerCall, attention: AttentionInputs) -> None:
        """See :class:`~beaconscope.models.tap.TappedCache`."""
        layer = self.layers[call.layer]
        info = self._info[call.layer]
        b, _, t, d = attention.query.shape
        query = attention.query.view(b, info.kv_heads, info.group_size, t, d)
        options = {"softcap": info.softcap, "sink_logit": info.sink_logit}
        if isinstance(layer, CompressedLayer):
            heads = self._heads(call.layer, attention.key, query.device)
            layer.absorb(query, attention.key, attention.value, heads, options)
            return
        if not self._rows:
            self._rows = _rows_by_length(call, b, t)
        if self.observer is not None and self.observer.wants(call.layer):
            self._observe_sliding(call.layer, query, attention, layer, options)

    def _observe_sliding(
        self, layer: int, query: Tensor, attention: AttentionInputs, stored: Any, options: dict[str, Any]
    ) -> None:
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
                scaling=info.scaling,
                window=stored.sliding_window,
                **options,
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
            scaling=info.scaling,
            device=device,
            rotary=self._rotary[layer],
            shared=stored.keys.shape[1] != key.shape[1],
            follow=self.observer is not None and self.observer.wants(layer),
        )

    def _check_padding(self, mask: Tensor | None, tokens: int, device: torch.device) -> None:
        """Refuse a first pass whose padding the positions do not tell."""
        if mask is None:
            if any(rows.padding for rows in self._rows):
                raise BeaconScopeError(
                    "position_ids speak of padding and the attention mask of none; pass both, or neither"
                )
            return
        seen = mask[:, 0, -1, -tokens:] if mask.dim() == 4 else mask[:, -tokens:]
        seen = seen if seen.dtype == torch.bool else (seen >= 0 if seen.is_floating_point() else seen > 0)
        for rows in self._rows:
            expected = torch.arange(tokens, device=device) >= rows.padding
            if not torch.equal(rows.take(seen.expand(max(seen.shape[0], 1), -1)), expected.expand(rows.size, -1)) and (
                rows.index is not None or seen.shape[0] == rows.size
            ):
                raise BeaconScopeError(
                    "only padding on the left, with position_ids that count from each prompt's first token, can be "
                    "compressed; set tokenizer.padding_side = 'left' (generate makes such position_ids)"
                )

    def _check_later(self, mask: Tensor, tokens: int) -> None:
        """Refuse padding among tokens that are fed onto a cache."""
        seen = mask[:, 0, -1, -tokens:]
        if not bool((seen if seen.dtype == torch.bool else seen >= 0).all()):
            raise BeaconScopeError(
                "padding after the first pass cannot be compressed; feed turns of equal length, or one at a time"
            )

    def reset(self) -> None:
        """Forget everything, for another generation."""
        self._rows = []
        self.layers = self._new_layers()

    @property
    def is_croppable(self) -> bool:
        """Whether a rollback is possible: never."""
        return False


class BeaconCache(CompressedCache):
    """BeaconKV's cache: ``model.generate(..., past_key_values=BeaconCache(model, budget=1024))``.

    Parameters
    ----------
    model
        The model that it is used with.
    **options
        Fields of :class:`~beaconscope.kv.policies.BeaconKV`.

    Raises
    ------
    BeaconScopeError
        For options out of their range, or a model that cannot be tapped.
    """

    def __init__(self, model: PreTrainedModel | TappedModel, **options: Any) -> None:
        known = {field.name for field in dataclasses.fields(BeaconKV)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise BeaconScopeError(f"BeaconCache has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
        super().__init__(model, BeaconKV(**options))


def _rotary_for(policy: Policy, info: LayerInfo) -> Rotary:
    if info.rotary is not None:
        return info.rotary
    if policy.needs_queries and getattr(policy, "query_space", "pre-rope") == "pre-rope" and info.window is None:
        raise BeaconScopeError(info.rotary_problem or "")
    return Rotary.none(info.key_size)


def _rows_by_length(call: LayerCall, batch: int, tokens: int) -> list[Rows]:
    """Group the sequences of a first pass by their padding, which their last position tells."""
    if call.position_ids is None or (batch == 1 and call.position_ids.shape[0] == 1):
        ends = [tokens - 1] * batch if call.position_ids is None else call.position_ids[:, -1].tolist()
    else:
        ends = call.position_ids.expand(batch, -1)[:, -1].tolist()
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
            torch.tensor([row for row in range(batch) if padding[row] == size], device=call.position_ids.device),  # type: ignore[union-attr]
            padding.count(size),
            size,
        )
        for size in sorted(set(padding))
    ]
