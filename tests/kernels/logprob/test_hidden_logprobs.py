"""Log-probs of hidden states: against float64, by tiles, in bfloat16, under torch.compile, what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.kernels.logprob import tiles
from pekoe.kernels.logprob.logprob import hidden_logprobs, logits_logprobs
from pekoe.kernels.logprob.reference import logprobs_and_entropy


def case(num_rows, size, num_columns, dtype=torch.float32, seed=0):
    """(hidden, weight, bias, targets, g, h)"""
    made = torch.Generator().manual_seed(seed)
    shapes = (num_rows, size), (num_columns, size), (num_columns,)
    tensors = [torch.randn(shape, generator=made).to(dtype).requires_grad_() for shape in shapes]
    weights = [torch.randn(num_rows, generator=made) for _ in range(2)]
    return (*tensors, torch.randint(0, num_columns, (num_rows,), generator=made), *weights)


def computed(arguments, num_valid=None, temperature=0.7):
    """[log-probs, entropies, gradients of hidden, weight, bias]"""
    hidden, weight, bias, targets, g, h = arguments
    logprobs, entropy = hidden_logprobs(hidden, weight, targets, temperature, bias=bias, num_valid=num_valid)
    loss = logprobs @ g.to(logprobs) + entropy @ h.to(entropy)
    return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))]


def exact(arguments, num_valid=None, temperature=0.7):
    """The same in float64, by all logits."""
    hidden, weight, bias = (tensor.detach().double().requires_grad_() for tensor in arguments[:3])
    logits = (hidden @ weight.T + bias)[:, :num_valid]
    logprobs, entropy = logprobs_and_entropy(logits, arguments[3], temperature)
    loss = logprobs @ arguments[4].double() + entropy @ arguments[5].double()
    return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))]


def errors(found, expected):
    return [float((one.double() - two).norm() / two.norm()) for one, two in zip(found, expected, strict=True)]


@pytest.mark.parametrize("implementation", ["native", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_float64_over_many_tiles(monkeypatch, implementation, dtype):
    monkeypatch.setenv("PEKOE_KERNELS", f"logprob={implementation}")
    monkeypatch.setattr(tiles, "ROWS", 16)
    monkeypatch.setattr(tiles, "ELEMENTS", 16 * 96)
    arguments = case(37, 24, 517, dtype)
    found, expected = computed(arguments), exact(arguments)
    assert [tensor.dtype for tensor in found[2:]] == [dtype] * 3
    assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    limit = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 3e-3}[dtype]
    assert max(errors(found, expected)) < limit
    # Products of bfloat16 are summed in float32: only the gradients' last rounding is bfloat16's.
    assert max(errors(found[:2], expected[:2])) < 2e-6


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, 40),
    size=st.integers(1, 9),
    num_columns=st.integers(2, 130),
    tile=st.tuples(st.integers(5, 50), st.integers(100, 900)),
    padding=st.integers(0, 5),
)
def test_any_shape_in_any_tiles(num_rows, size, num_columns, tile, padding):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tiles, "ROWS", tile[0])
        patched.setattr(tiles, "ELEMENTS", tile[1])
        hidden, weight, bias, targets, g, h = case(num_rows, size, num_columns + padding, seed=num_rows)
        arguments = (hidden, weight, bias, targets % num_columns, g, h)
        found, expected = computed(arguments, num_columns), exact(arguments, num_columns)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-4, atol=1e-4)
    assert found[3][num_columns:].eq(0).all()
    assert found[4][num_columns:].eq(0).all()


def test_memory_is_written_before_it_is_read(monkeypatch):
    """What torch hands out as fresh is filled with NaN."""
    arguments = case(9, 5, 70)
    expected = computed(arguments)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        found = computed(arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_threads_do_not_change_the_epilogue(monkeypatch):
    from pekoe.kernels.logprob import native

    monkeypatch.setattr(native, "SHARED_ELEMENTS", 100)
    logits, targets = torch.randn(50, 300, requires_grad=True), torch.randint(0, 300, (50,))

    def run():
        logprobs, entropy = logits_logprobs(logits, targets)
        return logprobs, entropy, *torch.autograd.grad((logprobs - 2 * entropy).sum(), logits)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run()
        torch.set_num_threads(3)
        found = run()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_only_gradients_that_are_asked_for_are_made():
    hidden, weight, bias, targets, _, _ = case(5, 4, 30)
    logprobs, _ = hidden_logprobs(hidden, weight.detach(), targets)
    expected = torch.autograd.grad(logprobs.sum(), hidden)[0]
    frozen, _ = hidden_logprobs(hidden.detach(), weight, targets)
    assert torch.autograd.grad(frozen.sum(), weight)[0].shape == weight.shape
    _, entropy = hidden_logprobs(hidden, weight, targets, bias=bias.detach())
    assert torch.autograd.grad(entropy.sum(), hidden)[0].ne(0).all()
    plain, none = hidden_logprobs(hidden, weight, targets, with_entropy=False)
    assert not none.requires_grad
    assert not none.any()
    torch.testing.assert_close(torch.autograd.grad(plain.sum(), hidden)[0], expected)


def test_no_tokens():
    arguments = case(0, 4, 30)
    found = computed(arguments)
    assert [tuple(tensor.shape) for tensor in found] == [(0,), (0,), (0, 4), (30, 4), (30,)]
    assert not any(tensor.any() for tensor in found[2:])


def test_a_second_derivative_is_refused():
    hidden, weight, _, targets, _, _ = case(5, 4, 30)
    (slope,) = torch.autograd.grad(
        hidden_logprobs(hidden, weight, targets)[0].square().sum(), hidden, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize(("row", "target"), [(2, 30), (4, -1)])
def test_a_target_outside_of_the_vocabulary_is_named(row, target):
    hidden, weight, _, targets, _, _ = case(5, 4, 31)
    targets = targets.clamp(max=29)
    targets[row] = target
    with pytest.raises(ValueError, match=rf"targets\[{row}\]: {target} is not allowed; 0 up to 29"):
        hidden_logprobs(hidden, weight, targets, num_valid=30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"weight": torch.zeros(30, 3)}, "weight"),
        ({"hidden": torch.zeros(5, 4, 1)}, "hidden"),
        ({"bias": torch.zeros(29)}, "bias"),
        ({"num_valid": 31}, "num_valid"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, "targets"),
        ({"targets": torch.zeros(5)}, "targets"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"hidden": torch.zeros(5, 4), "weight": torch.zeros(30, 4), "targets": torch.zeros(5).long()}
    with pytest.raises(ValueError, match=f"^{message}"):
        hidden_logprobs(**{**arguments, **change})


@pytest.mark.kernels
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loss_is_traced_whole(dynamic):
    hidden, weight, _, targets, g, h = case(7, 5, 33)

    def loss(hidden, weight):
        logprobs, entropy = hidden_logprobs(hidden, weight, targets, 0.7)
        others, _ = logits_logprobs(hidden @ weight.T, targets, with_entropy=False)
        return logprobs @ g + entropy @ h + others.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    found = torch.autograd.grad(compiled(hidden, weight), (hidden, weight))
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_operators_keep_their_promises(dtype, with_bias):
    """Schemas, and the shapes and dtypes of results that are not computed."""
    hidden, weight, bias, targets, g, h = case(7, 5, 33, dtype)
    hidden, weight = hidden.detach(), weight.detach()
    shift = bias.detach() if with_bias else None
    parts = ("test_schema", "test_faketensor")
    ops = torch.ops.pekoe
    four = ops.hidden_statistics(hidden, weight, shift, targets, 30, 0.7, True)
    torch.library.opcheck(ops.logprob_targets, (targets, 33), test_utils=parts)
    torch.library.opcheck(ops.hidden_statistics, (hidden, weight, shift, targets, 30, 0.7, True), test_utils=parts)
    torch.library.opcheck(
        ops.hidden_gradients,
        (hidden, weight, shift, targets, 30, 0.7, four[0], g, h, g, [True, not with_bias, with_bias]),
        test_utils=parts,
    )
    logits = hidden @ weight.T
    torch.library.opcheck(ops.logits_statistics, (logits, targets, 0.7, False, 3), test_utils=parts)
    torch.library.opcheck(ops.logits_gradient, (logits, targets, 0.7, four[0], g, h, g, 3), test_utils=parts)


@pytest.mark.parametrize(("num_rows", "size"), [(1, 16), (5, 3), (66, 8)])
def test_a_vocabulary_of_152_thousand(num_rows, size):
    """Sums of so many terms keep their digits, also those of few rows, which are not made in blocks."""
    arguments = case(num_rows, size, 151_936)
    for found, expected in zip(computed(arguments), exact(arguments), strict=True):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
