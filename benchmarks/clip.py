"""``fsdp_c.clip_grad_norm_`` compared with torch's on the same sharded gradients, over gloo.

Method. ``--ranks`` processes shard a model of ``--params`` parameters layer by layer and run one
backward. The calls take turns in each round on fresh copies of the gradients, with a maximum
norm that causes scaling. The script reports minima over the rounds on rank 0 in milliseconds. CPU
time is the calling thread's and excludes the wait for the collective. "installed" is the function
that replaces torch's under FSDP_C=1. Its total norm equals torch's on any number of ranks. The
total norm of ``fsdp_c.clip_grad_norm_`` must equal torch's on two ranks.

    python benchmarks/clip.py [--params 500] [--width 16 64 256] [--ranks 2] [--rounds 50]
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from ranks import Times, format_times, make_model, measure_in_turns, parse_tens, start_ranks
from report import parse_positive, write_json

from fsdp_c import clip_grad_norm_, fully_shard
from fsdp_c._runtime import torch_clipping


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradient clipping, torch and fsdp_c.")
    parser.add_argument("--params", type=parse_tens, default=500)
    parser.add_argument("--width", type=parse_positive, nargs="+", default=[16, 64, 256])
    parser.add_argument("--ranks", type=parse_positive, default=2)
    parser.add_argument("--rounds", type=parse_positive, default=50)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    if not start_ranks(options.ranks):
        return
    results = {width: measure(options, width) for width in options.width}
    if dist.get_rank() == 0:
        print(f"clip_grad_norm_, {options.params} parameters, {options.ranks} ranks: ms")
        print(format_times("width", results))
        print("torch's function after fsdp_c.install()")
        installed = {w: {**times, "fsdp_c": times["installed"]} for w, times in results.items()}
        print(format_times("width", installed))
        write_json(options.json, "clip", {"ms": results, **vars(options)})
    dist.destroy_process_group()


def measure(options: argparse.Namespace, width: int) -> dict[str, Times]:
    """Returns milliseconds of one call by implementation.

    Weights are (width, width), biases (width,).
    """
    torch.manual_seed(0)
    model = make_model(options.params, width)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.randn(2, width)).square().mean().backward()
    params = list(model.parameters())
    grads = [param.grad._local_tensor for param in params]
    saved_grads = [grad.clone() for grad in grads]
    totals: dict[str, torch.Tensor] = {}

    def restore() -> None:
        torch._foreach_copy_(grads, saved_grads)

    def clip_with_torch() -> None:
        totals["torch"] = torch.nn.utils.clip_grad_norm_(params, 1e-2)

    def clip_with_fsdp_c() -> None:
        totals["fsdp_c"] = clip_grad_norm_(params, 1e-2)

    def clip_with_installed_function() -> None:
        totals["installed"] = torch_clipping.clip_grad_norm_(params, 1e-2)

    calls = {
        "torch": clip_with_torch,
        "fsdp_c": clip_with_fsdp_c,
        "installed": clip_with_installed_function,
    }
    times = measure_in_turns(calls, options.rounds, restore)
    expected = totals["torch"].full_tensor()
    assert torch.equal(expected, totals["installed"].full_tensor())
    assert options.ranks > 2 or torch.equal(expected, totals["fsdp_c"])
    return times


if __name__ == "__main__":
    main()
