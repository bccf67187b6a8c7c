"""A process that was forked while a thread traces can trace, and runs the model that was being traced."""

import os
import signal
import threading

import pytest
import torch
from torch import nn

import scopetrace as st

X = torch.ones(2, 4)


class Waiting(nn.Module):
    """Its forward waits inside of the trace."""

    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), 2.0
        self.inside, self.may_go = threading.Event(), threading.Event()

    def forward(self, x):
        """Run it."""
        self.inside.set()
        self.may_go.wait(60)
        return self.fc(x) * self.scale


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_process_forked_while_a_thread_traces():
    waiting, other = Waiting(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    expected = other(X)
    thread = threading.Thread(target=lambda: st.trace(waiting, (X,)))
    thread.start()
    waiting.inside.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            right = torch.equal(st.trace(other, (X,))(X), expected)
            waiting.may_go.set()
            right = right and torch.equal(waiting(X), waiting.fc(X) * 2)
        finally:
            os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    waiting.may_go.set()
    thread.join()
    assert status == 0
