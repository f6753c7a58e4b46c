"""One forward pass: from a ForwardBatch to logits.

Owns: binding the decoder to KV and attention, embeddings of image tokens, and the block copies that
precede a step. Does not own: what is in the batch (batch.py), the mathematics (models/), or what
becomes of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kv_offload.copies import TierCopies, copy_now
from kv_offload.kv_cache import KVCache
from kv_offload.kv_manager import BlockCopy, BlockStore
from lm_engine.attention.base import AttentionBackend
from lm_engine.attention.staging import StagingRing
from lm_engine.batch import ForwardBatch
from lm_engine.models.decoder import Decoder, Deepstack


class Runner:
    """Forward passes of one decoder over one KV cache.

    `embeddings`: [rows, 1 + num_deepstack, D], the arena's storage, or None for a text model.
    `ring`: the staging buffers of `attention`, where it has some.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        attention: AttentionBackend,
        embeddings: Tensor | None = None,
        ring: StagingRing | None = None,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.attention = attention
        self.embeddings = embeddings
        self.ring = ring
        self.between_layers: Callable[[], None] | None = None
        """Called by each layer, so that a long step need not leave small questions waiting."""
        self.after_copies: Callable[[], None] | None = None
        """Called when a step's block copies are issued: what they read may be overwritten."""
        self.tiers = None if cache.host is None else TierCopies(cache, cache.host)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, copies: Iterable[BlockCopy | BlockStore] = ()) -> Tensor:
        """Writes the KV of every token of the batch and returns [R, vocab] float32 logits."""
        for copy in copies:
            if isinstance(copy, BlockStore):
                assert self.tiers is not None
                copy_now(self.tiers.store(copy.blocks, copy.slot), self.cache.device)
            else:
                self.cache.copy_blocks([copy.source], [copy.target])
        if self.after_copies is not None:
            self.after_copies()
        hidden = self.decoder.embed(batch.token_ids)
        deepstack = self._place_images(hidden, batch)
        config, evidence = self.decoder.config, batch.evidence

        between_layers = self.between_layers

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if between_layers is not None:
                between_layers()
            self.cache.write(layer, batch.attention.slots, k, v)
            out, lse = self.attention.attend(
                layer,
                q,
                batch.attention,
                self.cache,
                window=config.windows[layer],
                scale=config.scale,
            )
            if evidence is not None:
                evidence.observe(
                    layer, q, lse, self.cache, window=config.windows[layer], scale=config.scale
                )
            return out

        try:
            hidden = self.decoder(hidden, batch.positions, attend, deepstack)
        except BaseException:
            if self.ring is not None:
                self.ring.reset()
            raise
        return self.decoder.logits(hidden[batch.logits_rows])

    def _place_images(self, hidden: Tensor, batch: ForwardBatch) -> Deepstack | None:
        """Overwrites the image tokens' rows of `hidden` in place."""
        if batch.image_tokens is None or batch.image_rows is None:
            return None
        if self.embeddings is None:
            raise AssertionError("a text model was given image rows")
        rows = self.embeddings[batch.image_rows]
        hidden[batch.image_tokens] = rows[:, 0].to(hidden.dtype)
        if rows.shape[1] == 1:
            return None
        return Deepstack(batch.image_tokens, rows[:, 1:].transpose(0, 1).to(hidden.dtype))
