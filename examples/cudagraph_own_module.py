"""CUDA graphs around a torch module of one's own: `pip install bateleur-cudagraph`.

A recurrent decoder keeps a state per sequence. Its steps are captured for some batch sizes and replayed, and a second
module is captured over the buffers of the first. Without a GPU, the recorded backend emulates CUDA graphs
on CPU.

    python examples/cudagraph_own_module.py
"""

import torch
from torch import Tensor, nn

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    CapturedStateProducer,
    CudagraphDispatcher,
    CudaGraphManager,
    CudaGraphMode,
    Phase,
    StagedBatch,
    StaleState,
    UnpaddedBatch,
    get_backend,
)  # fmt: skip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Decoder(nn.Module):
    """A recurrent decoder. It updates states in place, because a graph has their addresses. Padding uses sequence 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(100, 32), nn.GRUCell(32, 32), nn.Linear(32, 100)
        self.register_buffer("states", torch.zeros(17, 32))

    def forward(self, batch: Tensor) -> Tensor:
        """(2, rows) token and sequence of each row -> logits."""
        ids, sequences = batch
        state = self.cell(self.embedding(ids), self.states[sequences])
        self.states.index_copy_(0, sequences, state)
        return self.head(state)


class Producer:
    """Stages real and dummy batches at the same addresses."""

    def __init__(self) -> None:
        self.generation, self.batch = 0, torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)

    def stage(
        self, key: BatchExecutionDescriptor, phase: Phase, ids: list[int] = (), sequences: list[int] = ()
    ) -> StagedBatch:
        """Stage a batch. Padding rows, and all rows of a dummy batch, use sequence 0."""
        self.generation += 1
        self.batch.zero_()[:, : len(ids)] = torch.tensor([ids, sequences])
        return StagedBatch(key, self.batch[:, : key.num_tokens], self.generation)

    def addresses(self) -> dict[str, int]:
        return {"batch": self.batch.data_ptr()}


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model, producer = Decoder().to(DEVICE), Producer()
    backend = get_backend("cuda" if DEVICE == "cuda" else "recorded", DEVICE)
    dispatcher = CudagraphDispatcher.make(CudaGraphMode.FULL_DECODE_ONLY, capture_sizes=[1, 2, 4, 8])
    manager = CudaGraphManager(dispatcher, backend)
    states = manager.capture(producer, lambda execution: model(execution.state))
    print(manager.report.table())

    key = dispatcher.dispatch(UnpaddedBatch(3, 3, 1, 1, decode_only=True), manager.ready).descriptor
    print(f"3 rows: {key}; 9 rows: {dispatcher.dispatch(UnpaddedBatch(9, 9, 1, 1, decode_only=True)).reason}")
    ids, sequences = [7, 8, 9], [5, 2, 11]
    for step in range(3):
        before = model.states.clone()
        staged = producer.stage(key, Phase.RUN, ids, sequences)
        replayed, after = manager.replay(key, staged)[:3].clone(), model.states.clone()
        model.states.copy_(before)
        torch.testing.assert_close(replayed, model(staged.state)[:3])
        torch.testing.assert_close(after[1:], model.states[1:])
        ids = replayed.argmax(-1).tolist()
        print(f"step {step}: tokens {ids}; logits and states equal those of the module")

    # Capture a second module that reads the captured states of the first. One staging serves both graphs.
    judge = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 1)).to(DEVICE)
    second = CudaGraphManager(dispatcher, backend)
    second.capture(CapturedStateProducer(states), lambda execution: judge(execution.state[0]), keys=[key])
    staged = producer.stage(key, Phase.RUN, ids, sequences)
    torch.testing.assert_close(second.replay(key, staged)[:3], judge(staged.state[0])[:3])
    print("a second graph on the same staged batch: equal to its module")

    # Restaging a captured state overwrites the buffers, so the batch that was staged before must not be replayed.
    states[key].restage(Phase.WARMUP)
    try:
        manager.replay(key, staged)
    except StaleState as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("a stale batch was replayed")


if __name__ == "__main__":
    main()
