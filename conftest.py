"""What all tests share."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests run in as many processes as there are cores, and their models are small: one thread each is the fastest."""
    torch.set_num_threads(1)
