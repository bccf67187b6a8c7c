"""Memory that a NumPy array and a tensor share: a trace is as eager, or it is refused when it is made."""

import numpy
import pytest
import torch

import scopetrace as st


def torch_writes(self, x):
    torch.from_numpy(self.array).add_(1)
    return x * float(self.array[0])


def torch_writes_and_reads(self, x):
    t = torch.from_numpy(self.array)
    t.add_(1)
    return t * x


def torch_writes_what_another_tensor_reads(self, x):
    torch.from_numpy(self.array).add_(1)
    return torch.from_numpy(self.array) * x


def numpy_writes_before(self, x):
    self.array += 1
    return torch.from_numpy(self.array) * x


def numpy_writes_after(self, x):
    t = torch.from_numpy(self.array)
    self.array += 1
    return t * x


def numpy_writes_a_buffer(self, x):
    self.array += 1
    return self.buffer * x


def torch_writes_a_buffer(self, x):
    self.buffer.add_(1)
    return torch.as_tensor(self.array) * x


def torch_writes_a_buffer_that_numpy_reads(self, x):
    self.buffer.add_(1)
    return x * self.array.sum()


def numpy_writes_what_frombuffer_reads(self, x):
    self.array[1:] = 7
    return torch.frombuffer(self.array, dtype=torch.float64) * x


def one_of_its_own_is_read_between(self, x):
    array = numpy.arange(3.0)
    t = torch.from_numpy(array)
    y = t * x
    array += 1
    return y + t


def torch_reads(self, x):
    return torch.from_numpy(self.array) * x + self.buffer


def torch_writes_one_of_its_own(self, x):
    return torch.from_numpy(numpy.arange(3.0)).add_(1).mul_(x)


def torch_writes_a_buffer_alone(self, x):
    self.buffer.add_(x)
    return self.buffer * 2


SERVED = (torch_reads, torch_writes_one_of_its_own, torch_writes_a_buffer_alone)
REFUSED = (
    torch_writes,
    torch_writes_and_reads,
    torch_writes_what_another_tensor_reads,
    numpy_writes_before,
    numpy_writes_after,
    numpy_writes_a_buffer,
    torch_writes_a_buffer,
    torch_writes_a_buffer_that_numpy_reads,
    numpy_writes_what_frombuffer_reads,
    one_of_its_own_is_read_between,
)


class Net(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.array = function, numpy.arange(3.0)
        self.register_buffer("buffer", torch.from_numpy(self.array))

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize("function", SERVED)
def test_is_as_eager(function):
    x, expected, net = torch.full((3,), 2.0, dtype=torch.float64), Net(function), Net(function)
    trace = st.trace(net, (x,))
    for _ in range(2):
        torch.testing.assert_close(trace(x), expected(x))
        numpy.testing.assert_array_equal(net.array, expected.array)


@pytest.mark.parametrize("function", REFUSED)
def test_is_refused(function):
    net = Net(function)
    with pytest.raises(st.errors.UnsupportedOpError, match=r"NumPy array.*\n.*torch\.from_numpy") as caught:
        st.trace(net, (torch.ones(3, dtype=torch.float64),))
    assert f"in {function.__name__}" in caught.value.source
    numpy.testing.assert_array_equal(net.array, numpy.arange(3.0))
