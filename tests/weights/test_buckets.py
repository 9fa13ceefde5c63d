"""The cut into buckets: order, bounds, alignment, and that bytes come back as they went in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.pipeline.messages import TensorSpec
from pekoe.pipeline.weights.buckets import ALIGNMENT, checksum, fill, plan_buckets, views

DTYPES = ["float32", "bfloat16", "float64", "uint8", "int64", "float8_e4m3fn"]
SPECS = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES)), max_size=12).map(
    lambda drawn: [TensorSpec(f"t{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(drawn)]
)


def random_tensor(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    count = int(torch.Size(spec.shape).numel())
    raw = torch.randint(0, 255, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(spec.shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


@settings(max_examples=60, deadline=None)
@given(SPECS, st.integers(1, 3000), st.integers(0, 99))
def test_round_trip_through_poisoned_buffers(specs, bucket_bytes, seed):
    plan = plan_buckets(specs, bucket_bytes)
    assert [slot.spec for bucket in plan.buckets for slot in bucket.slots] == specs
    generator = torch.Generator().manual_seed(seed)
    weights = [(spec.name, random_tensor(spec, generator)) for spec in specs]
    assert plan.total_bytes == sum(tensor.nbytes for _, tensor in weights)
    assert plan.num_tensors == len(weights)
    buffer = torch.full((plan.largest,), 0xFF, dtype=torch.uint8)
    source = iter(weights)
    found = []
    for bucket in plan.buckets:
        assert bucket.num_bytes <= bucket_bytes or len(bucket.slots) == 1
        assert all(slot.offset % ALIGNMENT == 0 for slot in bucket.slots)
        fill(bucket, buffer, source)
        found += [(name, tensor.clone()) for name, tensor in views(bucket, buffer)]
        buffer.fill_(0xFF)
    assert next(source, None) is None
    for (name, tensor), (found_name, found_tensor) in zip(weights, found, strict=True):
        assert (name, tensor.dtype, tensor.shape) == (found_name, found_tensor.dtype, found_tensor.shape)
        assert raw_bytes(tensor) == raw_bytes(found_tensor)


def test_digest_tells_what_differs():
    specs = [TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (4,), "bfloat16")]
    digests = {
        plan_buckets(specs, 64).digest,
        plan_buckets(specs, 128).digest,
        plan_buckets(specs[::-1], 64).digest,
        plan_buckets([specs[0], TensorSpec("b", (4,), "float16")], 64).digest,
        plan_buckets([TensorSpec("a", (3, 2), "float32"), specs[1]], 64).digest,
        plan_buckets([TensorSpec("c", (2, 3), "float32"), specs[1]], 64).digest,
    }
    assert len(digests) == 6
    assert all(0 <= digest < 1 << 63 for digest in digests)


def test_large_tensor_gets_its_own_bucket():
    specs = [
        TensorSpec("small", (4,), "float32"),
        TensorSpec("large", (100,), "float32"),
        TensorSpec("x", (4,), "float32"),
    ]
    assert [bucket.names for bucket in plan_buckets(specs, 64).buckets] == ["small", "large", "x"]
    assert [bucket.names for bucket in plan_buckets(specs, 4096).buckets] == ["small … x"]


def test_checksum_ignores_padding_and_sees_every_byte():
    (bucket,) = plan_buckets([TensorSpec("a", (3,), "uint8"), TensorSpec("b", (5,), "uint8")], 64).buckets
    first = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    other = first.clone()
    other[3] = 9
    assert checksum(bucket, first) == checksum(bucket, other)
    for index in (0, 2, 16, 20):
        changed = first.clone()
        changed[index] = 1
        assert checksum(bucket, changed) != checksum(bucket, first)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([TensorSpec("a", (1,), "float32"), TensorSpec("a", (1,), "float32")], "'a' is named twice"),
        ([TensorSpec("a", (1,), "float31")], "'float31' is not known"),
    ],
)
def test_impossible_specs(specs, message):
    with pytest.raises(ValueError, match=message):
        plan_buckets(specs, 64)
