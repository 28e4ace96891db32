"""What a captured step on a GPU must not do."""

import torch


def read_device(batch):
    batch.tokens.sum().item()


def copy_unpinned(batch):
    batch.hidden.copy_(torch.zeros(batch.hidden.shape))


def wait_for_the_device(batch):
    torch.cuda.synchronize()


def leave_a_fork(batch):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        batch.hidden + 1
