"""All passes of a proposal that runs eagerly on a CPU, where what counts is how many operators they are.

The keys of a draft are read by the drafts behind it and by nobody else: the next step's first pass stores those of all
tokens that stayed. So here they never reach the cache. What rows have in it is gathered once, each pass puts its own
behind that, and attends with three operators; nothing is staged from pass to pass but tokens and positions.

Legend for shapes: n rows, S keys gathered of a row, K drafts, Hq/Hk query and key heads, D head size, V draft
vocabulary, W drafts whose keys others read.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.eagle.buffers import NO_TOKEN, DraftInputs
from bateleur.eagle.cache import DraftCache
from bateleur.eagle.drafter import DraftContext
from bateleur.eagle.heads.spec import Head, lanes_of
from bateleur.eagle.noise import Lanes, Role, gumbel
from bateleur.eagle.passes import DraftPasses, DraftState
from bateleur.eagle.rules import Rule, tempering
from bateleur.metadata import ops

_MAX_NOISE = 1 << 20  # numbers made beforehand: 4 MiB
_MAX_KEYS = 1 << 24  # numbers gathered of the keys of a layer: 64 MiB


class HostChain:
    """Drafts under COUPLED with a head whose layers see all positions, over `inputs` that are staged for a first pass.

    The drafts are those of the passes that a graph may hold, but for what rounds otherwise.
    """

    def __init__(self, head: Head, cache: DraftCache, inputs: DraftInputs, passes: DraftPasses) -> None:
        self._head, self._cache, self._inputs, self._passes = head, cache, inputs, passes
        self._lanes = lanes_of(head, inputs.device)

    @staticmethod
    def fits(head: Head, inputs: DraftInputs, rule: Rule) -> bool:
        """Whether such a head's drafts can be made here."""
        return inputs.device.type == "cpu" and rule is Rule.COUPLED and head.spec.sliding_window is None

    def has_room(self, num_rows: int, max_seq_len: int) -> bool:
        """Whether the keys of so many rows of such a length are few enough to lie twice in memory."""
        return num_rows * max_seq_len * self._cache.kv[0][0][0, 0].numel() <= _MAX_KEYS

    def run(self, state: DraftState, context: DraftContext) -> None:
        """Write the drafts that the context asks for, at least one, of each row of the staged step to `inputs.tokens`;
        the last layer alone hides what is before `begins`.
        """
        x, num_rows, num_drafts = self._inputs, state.batch.num_actual_reqs, context.num_drafts
        noise = _Noise(x, self._lanes, num_rows, num_drafts, greedy=state.greedy)
        draw = partial(self._draw, noise)
        last_n, places_K1 = x.arrays().token_positions[:num_rows] - 2, np.arange(num_drafts)[:, None]
        first_n = None if context.begins is None else context.begins.numpy()
        keys = _Keys(self._cache, x, first_n, last_n, num_drafts - 1)
        h_nH, hidden_nH = self._passes.outputs(state, x.last_index[:num_rows], partial(self._first, keys))
        keys.gather_missing()
        best_n, token_n = draw(h_nH, 0)
        best, tokens = [best_n], [token_n]
        positions = torch.from_numpy(np.minimum(last_n + places_K1, x.limits.max_model_len - 1))
        for place in range(1, num_drafts):
            h_nH, hidden_nH = self._head.forward(
                token_n, hidden_nH, positions[place], partial(keys.attend, place)
            )
            best_n, token_n = draw(h_nH, place)
            best.append(best_n)
            tokens.append(token_n)
        drawn = torch.stack(best).numpy() > -np.inf  # NaN is not, nor a row without support
        drawn &= last_n + places_K1[: len(tokens)] < x.limits.max_model_len
        ids = np.where(drawn, torch.stack(tokens).numpy(), NO_TOKEN)
        x.arrays().tokens[:num_rows, : len(tokens)] = ids.T

    def _first(self, keys: _Keys, state: DraftState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the last layer in the first pass, of the tokens that draw; of others it says nothing."""
        layer, last_n = len(self._cache.kv) - 1, self._inputs.last_index[: state.batch.num_actual_reqs]
        ops.write_kv(k, v, *self._cache.kv[layer], state.metadata.slot_mapping)
        keys.gather(layer)
        return torch.zeros_like(q).index_copy_(0, last_n, keys.read(layer, q.index_select(0, last_n), 0))

    def _draw(self, noise: _Noise, h_nH: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """The largest of what is drawn from, and its (n,) int64 target id: a safe one where there is no draw."""
        logits_nV = self._head.logits(h_nH)
        best_n, token_n = noise.on(logits_nV, place).max(-1)
        if (part := self._lanes.part) is not None:
            token_n, bad_n = part.elect(best_n, token_n)
            return best_n.new_zeros(len(bad_n)).masked_fill_(bad_n, -np.inf), token_n
        ids = self._head.target_ids
        return best_n, token_n if ids is None else ids.index_select(0, token_n)


class _Noise:
    """What the drafts of n rows are drawn with: the target's noise at the positions of their tokens."""

    def __init__(self, inputs: DraftInputs, lanes: Lanes, num_rows: int, num_drafts: int, *, greedy: bool):
        self._seeds, self._lanes, self._greedy = inputs.seeds[:num_rows], lanes, greedy
        self._position_n = inputs.token_positions[:num_rows]
        if greedy:
            return
        temperature_n = inputs.temperature[:num_rows]
        self._divisor_n1 = tempering(temperature_n).unsqueeze(1)
        self._drawn_n1 = (temperature_n > 0).float().unsqueeze(1)
        # For few rows that of all drafts costs no more than that of one.
        at_once = num_rows * num_drafts * len(lanes.words) <= _MAX_NOISE
        self._made = self._make(0, num_drafts if at_once else 1)

    def on(self, logits_nV: Tensor, place: int) -> Tensor:
        """What the draft at a place is the largest of."""
        if self._greedy:
            return logits_nV
        if place >= len(self._made):
            self._made, place = self._make(place, 1), 0
        return torch.addcdiv(self._made[place], logits_nV, self._divisor_n1)

    def _make(self, first: int, count: int) -> Tensor:
        """(count, n, V), 0 in greedy rows."""
        place_K1 = torch.arange(first, first + count).unsqueeze(1)
        position_Kn = self._position_n + place_K1
        keys = Rule.COUPLED.keys(self._seeds.repeat(count), position_Kn.flatten(), 0)
        noise = gumbel(keys, Role.TARGET, self._lanes)
        return noise.view(count, len(self._seeds), -1).mul_(self._drawn_n1)


class _Keys:
    """Keys and values of every layer: those that the rows have in the cache, and behind them those of W drafts."""

    def __init__(
        self,
        cache: DraftCache,
        inputs: DraftInputs,
        first_n: NDArray[np.int64] | None,
        last_n: NDArray[np.int64],
        num_drafts: int,
    ) -> None:
        """first_n: the first position of each row that is seen, None for 0. last_n: the last one that is stored when
        its layer is gathered. num_drafts is W.
        """
        num_rows, block_size = len(last_n), cache.blocks.block_size
        num_blocks = int(last_n.max()) // block_size + 1
        self._cache, self._more = cache.kv, num_drafts
        self._blocks = inputs.block_table[:num_rows, :num_blocks].flatten()
        self._stored = num_blocks * block_size
        missing = np.arange(self._stored) > last_n[:, None]
        if first_n is not None:
            missing |= np.arange(self._stored) < first_n[:, None]
        self._hidden = torch.from_numpy(missing).view(num_rows, 1, self._stored, 1)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        keys = cache.kv[0][0]
        bias = np.zeros((num_rows, 1, self._stored + num_drafts), np.float32)
        bias[:, 0, : self._stored][missing] = -np.inf
        self._bias = torch.from_numpy(bias.repeat(keys.shape[2], 0)).to(keys.dtype)

    def gather(self, layer: int) -> None:
        """Read what the cache holds of a layer."""
        keys, values = self._cache[layer]
        self._layers[layer] = self._gathered(keys), self._gathered(values)

    def gather_missing(self) -> None:
        """Read those layers that nobody has gathered."""
        for layer in range(len(self._cache)):
            if self._more and layer not in self._layers:
                self.gather(layer)

    def attend(self, place: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(n, Hq, D) for the draft at `place`, from 1 on, of each row, which sees those before it."""
        for new, held in zip((k, v), self._layers[layer], strict=True):
            held[:, :, self._stored + place - 1] = new
        return self.read(layer, q, place)

    def read(self, layer: int, q: Tensor, num_drafts: int) -> Tensor:
        """Attention (n, Hq, D) over what is gathered, and so many drafts."""
        (num_rows, num_heads, dim), seen = q.shape, self._stored + num_drafts
        keys, values = (held.flatten(0, 1)[:, :seen] for held in self._layers[layer])
        q = q.reshape(len(keys), -1, dim)
        scores = torch.baddbmm(self._bias[:, :, :seen], q, keys.transpose(1, 2), alpha=dim**-0.5)
        return torch.bmm(scores.softmax(-1), values).view(num_rows, num_heads, dim)

    def _gathered(self, cache: Tensor) -> Tensor:
        """(n, Hk, S + W, D), 0 at hidden places, where NaN may be, too; those of drafts are not yet written."""
        num_rows, _, stored, _ = self._hidden.shape
        num_kv_heads, dim = cache.shape[2:]
        found = cache.index_select(0, self._blocks).view(num_rows, stored, num_kv_heads, dim)
        room = cache.new_empty(num_rows, num_kv_heads, stored + self._more, dim)
        room[:, :, :stored].copy_(found.transpose(1, 2)).masked_fill_(self._hidden, 0)
        return room
