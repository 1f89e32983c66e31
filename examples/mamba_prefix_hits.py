"""Serves a Mamba-2 model of transformers with prefix caching: `pip install bateleur-mamba transformers`.

Two requests share batches. The second one starts from a cached state of the first, so their common prefix is computed
once. The tokens equal those that the model itself generates for each prompt.

    python examples/mamba_prefix_hits.py
"""

from dataclasses import dataclass

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from bateleur.mamba import CacheLayout, FoldCache, FoldStep, Mamba2, MambaCacheMode, Mixer, StatePolicy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, ROWS = 16, 2  # tokens per block, concurrent requests
FOLD = StatePolicy.FOLD
LAYOUT = CacheLayout(MambaCacheMode.ALL, BLOCK, num_speculative_tokens=0, max_model_len=64, policy=FOLD)


def mixer_of(layer: torch.nn.Module) -> Mixer:
    """The part of a layer between its projections, which has a recurrent state."""
    sizes = layer.num_heads, layer.head_dim, layer.ssm_state_size, layer.n_groups
    spec = Mamba2(*sizes, conv_dtype=torch.float32, policy=FOLD)
    conv, A = layer.conv1d, -layer.A_log.float().exp()
    return Mixer(spec, conv.weight.squeeze(1), conv.bias, (A, layer.D, layer.dt_bias))


def forward(model: Mamba2ForCausalLM, ids: torch.Tensor, step: FoldStep) -> torch.Tensor:
    """Compute the logits of all tokens of a step with the model's modules and our `Mixer`."""
    hidden = model.backbone.embeddings(ids)
    for index, block in enumerate(model.backbone.layers):
        layer = block.mixer
        sizes = [layer.intermediate_size, layer.conv_dim, layer.num_heads]
        gate, xbc, dt = layer.in_proj(block.norm(hidden)).split(sizes, -1)
        hidden = hidden + layer.out_proj(layer.norm(step.mix(index, xbc, dt).flatten(1), gate))
    return model.lm_head(model.backbone.norm_f(hidden))


@dataclass
class Request:
    """A request: the states cover its first `computed` tokens; `row` is its row of the block table."""

    row: int
    tokens: list[int]
    computed: int


class Server:
    """Schedules requests, and maps prefixes to state pages."""

    def __init__(self, model: Mamba2ForCausalLM) -> None:
        self.model, self.running, self.published = model, list[Request](), dict[tuple[int, ...], int]()
        columns = LAYOUT.columns()
        pages = 1 + torch.arange(ROWS * columns, dtype=torch.int32, device=DEVICE)  # row 0 and page 0 are reserved
        self.table = torch.cat((torch.zeros_like(pages[:columns]), pages)).view(1 + ROWS, columns)
        mixers = [mixer_of(block.mixer) for block in model.backbone.layers]
        self.cache = FoldCache(LAYOUT, mixers, num_slots=1 + len(pages), num_rows=1 + ROWS, chunk_size=BLOCK)

    def add(self, prompt: list[int]) -> Request:
        """Start a request after its longest cached prefix, whose page its block table refers to."""
        row, hit = 1 + len(self.running), LAYOUT.max_hit_tokens(len(prompt))
        while hit and tuple(prompt[:hit]) not in self.published:
            hit -= BLOCK
        if hit:
            self.table[row, LAYOUT.column(hit)] = self.published[tuple(prompt[:hit])]
        self.cache.admit([row], hit)
        self.running.append(Request(row, list(prompt), hit))
        return self.running[-1]

    @torch.no_grad()
    def step(self) -> None:
        """Compute one token for each request, in one batch with the decoding rows first."""
        batch = sorted(self.running, key=lambda each: len(each.tokens) - each.computed)
        rows, lens = [each.row for each in batch], [len(each.tokens) - each.computed for each in batch]
        computed = torch.tensor([each.computed for each in batch], device=DEVICE)
        step = self.cache.step(self.table[rows], rows, computed, lens, num_decodes=lens.count(1))
        ids = [token for each in batch for token in each.tokens[each.computed :]]
        logits = forward(self.model, torch.tensor(ids, device=DEVICE), step)
        step.commit(lens)
        for request, token in zip(batch, logits[torch.tensor(lens).cumsum(0) - 1].argmax(-1).tolist(), strict=True):
            for column in range(request.computed // BLOCK, len(request.tokens) // BLOCK):  # blocks that are full now
                page = int(self.table[request.row, column])
                self.published.setdefault(tuple(request.tokens[: (column + 1) * BLOCK]), page)
            request.computed = len(request.tokens)
            request.tokens.append(token)


def main() -> None:
    torch.manual_seed(1)
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 2}
    config = Mamba2Config(**sizes, num_hidden_layers=2, initializer_range=0.3, eos_token_id=None)
    server = Server(model := Mamba2ForCausalLM(config).to(DEVICE).eval())  # random weights, for this example
    prefix = torch.randint(128, (40,)).tolist()
    prompts = [*prefix, 5, 6, 7], [*prefix, 8, 9, 10, 11, 12]
    first = server.add(prompts[0])
    for _ in range(3):
        server.step()
    second = server.add(prompts[1])
    print(f"request 2 begins after {second.computed} tokens, in page {int(server.table[2, 1])} of request 1")
    assert second.computed == 32
    for _ in range(12):
        server.step()
    for request, prompt in zip((first, second), prompts, strict=True):
        with torch.no_grad():
            whole = model(torch.tensor([request.tokens], device=DEVICE), use_cache=False).logits[0]
        text = request.tokens[len(prompt) :]
        assert text == whole.argmax(-1)[len(prompt) - 1 : -1].tolist()
        print(f"request {request.row}: {text}, equal to the model's own choice over the whole text")


if __name__ == "__main__":
    main()
