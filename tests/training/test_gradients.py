"""The pieces of ``gradients`` that need no second rank."""

import torch
from torch import nn

from ddp_slurm.training import no_sample_loss


def test_a_rank_without_samples_still_gives_ddp_an_input_to_move() -> None:
    """DDP with ``device_ids`` moves its inputs to the GPU, and fails with an IndexError where there is none."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    seen: list[tuple[torch.Tensor, ...]] = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    statistics = model[1].running_mean.clone()
    loss = no_sample_loss(model)
    loss.backward()
    assert [len(inputs) for inputs in seen] == [1]
    assert loss.item() == 0
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters()
    )
    assert torch.equal(model[1].running_mean, statistics), "the model's own forward did not run"
    assert model(torch.ones(4, 3)).shape == (4, 2), "and it is back in its place"


def test_a_forward_that_was_patched_in_comes_back() -> None:
    model = nn.Linear(3, 2)
    model.forward = patched = lambda inputs: inputs + 1  # as torch.compile does
    no_sample_loss(model)
    assert model.forward is patched
