from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge_async.trainer.logprobs import Predictions, selected_logprobs
from forge_async.trainer.segments import Segment, attention_layout, segment_attention


def test_attention_equals_a_dense_mask() -> None:
    torch.manual_seed(0)
    segments = [
        Segment(0, 5),
        Segment(5, 3, 0),
        Segment(8, 2, 1),
        Segment(10, 20, 1),
        Segment(30, 20, 0),
        Segment(50, 1),
    ]
    total, heads, kv_heads, dim = 51, 4, 2, 8
    parents = {0: [], 1: [0], 2: [1, 0], 3: [1, 0], 4: [0], 5: []}
    mask = torch.zeros(total, total, dtype=torch.bool)
    for index, segment in enumerate(segments):
        for query in range(segment.start, segment.start + segment.length):
            for above in (segments[parent] for parent in parents[index]):
                mask[query, above.start : above.start + above.length] = True
            mask[query, segment.start : query + 1] = True
    q = torch.randn(1, total, heads, dim, requires_grad=True)
    k, v = (torch.randn(1, total, kv_heads, dim, requires_grad=True) for _ in range(2))
    wide_k, wide_v = (x[0].repeat_interleave(2, dim=1) for x in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q[0], wide_k) / math.sqrt(dim)
    expected = torch.einsum("nqk,knh->qnh", scores.masked_fill(~mask, -math.inf).softmax(-1), wide_v)
    weight = torch.randn_like(expected)
    expected_grads = torch.autograd.grad((expected * weight).sum(), (q, k, v))

    actual = segment_attention(q, k, v, attention_layout(segments), None)
    torch.testing.assert_close(actual[0], expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad((actual[0] * weight).sum(), (q, k, v))
    for got, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [value.untyped_storage().nbytes() for value in tree_leaves(made) if isinstance(value, torch.Tensor)]
        self.nbytes = max(self.nbytes, *sizes, 0)
        return made


def test_many_completions_of_a_long_prompt_take_the_memory_of_their_row() -> None:
    """64 completions see 512 prompt tokens each: 34304 keys, in a row of 1024 tokens."""
    segments = [Segment(0, 512), *(Segment(512 + 8 * index, 8, 0) for index in range(64))]
    layout = attention_layout(segments)
    assert sum(bucket.key_SC.numel() for bucket in layout.buckets) > 30 * 1024
    q = torch.randn(1, 1024, 8, 32, requires_grad=True)
    k, v = (torch.randn(1, 1024, 4, 32, requires_grad=True) for _ in range(2))
    row = q.nbytes + k.nbytes + v.nbytes
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = segment_attention(q, k, v, layout, None)
        output.sum().backward()
    assert sum(kept.values()) <= row, "what the backward pass starts from"
    assert largest.nbytes <= row, "and what is there at any time"


def test_logprobs_in_chunks_equal_the_full_softmax() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 6, requires_grad=True)
    weight = torch.randn(11, 6, requires_grad=True)
    label = torch.tensor([0, 10, 3, 3, 5, 1, 2])
    scale = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0, 1.0, 4.0])
    full = ((hidden @ weight.T) * scale[:, None]).log_softmax(-1)
    expected = full[torch.arange(7), label]
    entropy = -(full.exp() * full).sum(-1)
    expected_grads = torch.autograd.grad(expected.square().sum(), (hidden, weight))
    for chunk in (2, 100):
        got = selected_logprobs(hidden, weight, Predictions(torch.arange(7), label, scale, chunk_size=chunk))
        torch.testing.assert_close(got[0], expected)
        torch.testing.assert_close(got[1], entropy)
        grads = torch.autograd.grad(got[0].square().sum(), (hidden, weight))
        for actual, wanted in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(actual, wanted)
