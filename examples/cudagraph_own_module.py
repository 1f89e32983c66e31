"""CUDA graphs around a torch module of one's own: `pip install bateleur-cudagraph`.

A recurrent decoder keeps a state per sequence. Its steps are captured for some batch sizes and replayed, and a second
module is captured over the buffers of the first. Without a GPU the recorded backend stands in for CUDA graphs: what is
captured is frozen, overwritten and refused as there.

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
    """States are updated in place, for a graph knows them by address; sequence 0 is nobody's."""

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
    """Stages every batch, real or dummy, at the same addresses."""

    def __init__(self) -> None:
        self.generation, self.batch = 0, torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)

    def stage(
        self, key: BatchExecutionDescriptor, phase: Phase, ids: list[int] = (), sequences: list[int] = ()
    ) -> StagedBatch:
        """Rows that pad a batch, and all rows of a dummy, belong to sequence 0."""
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
    plan = CudagraphDispatcher.make(CudaGraphMode.FULL_DECODE_ONLY, capture_sizes=[1, 2, 4, 8])
    manager = CudaGraphManager(plan, backend)
    states = manager.capture(producer, lambda execution: model(execution.state))
    print(manager.report.table())

    key = plan.dispatch(UnpaddedBatch(3, 3, 1, 1, decode_only=True), manager.ready).descriptor
    print(f"3 rows: {key}; 9 rows: {plan.dispatch(UnpaddedBatch(9, 9, 1, 1, decode_only=True)).reason}")
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

    # A second module, captured over the states that the first capture returned: one staging serves both graphs.
    judge = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 1)).to(DEVICE)
    second = CudaGraphManager(plan, backend)
    second.capture(CapturedStateProducer(states), lambda execution: judge(execution.state[0]), keys=[key])
    staged = producer.stage(key, Phase.RUN, ids, sequences)
    torch.testing.assert_close(second.replay(key, staged)[:3], judge(staged.state[0])[:3])
    print("a graph over states on loan: equal to its module")

    # Whoever borrows a state stages it anew. What was staged before is gone then, and its replay is refused.
    states[key].restage(Phase.WARMUP)
    try:
        manager.replay(key, staged)
    except StaleState as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("a stale batch was replayed")


if __name__ == "__main__":
    main()
