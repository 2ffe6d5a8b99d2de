"""``fsdp_c.load_full_state_dict`` compared with torch's ``set_model_state_dict``, over gloo.

Method. ``--ranks`` processes shard a model of ``--params`` parameters layer by layer. Rank 0 has
the full state dict. The two functions load it in turns, torch's with the options
``full_state_dict`` and ``broadcast_from_rank0``. Before the rounds, the script checks that both set
the weights to those of the state dict. The script reports minima over the rounds on rank 0 in
milliseconds: wall time, and CPU time of the calling thread.

    python benchmarks/load.py [--params 500] [--width 16 64 256] [--ranks 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from ranks import Times, format_times, make_model, measure_in_turns, parse_tens, start_ranks
from report import parse_positive, write_json
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fsdp_c import fully_shard, load_full_state_dict


def main() -> None:
    parser = argparse.ArgumentParser(description="Loading a full state dict, torch and fsdp_c.")
    parser.add_argument("--params", type=parse_tens, default=500)
    parser.add_argument("--width", type=parse_positive, nargs="+", default=[16, 64, 256])
    parser.add_argument("--ranks", type=parse_positive, default=2)
    parser.add_argument("--rounds", type=parse_positive, default=5)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    if not start_ranks(options.ranks):
        return
    results = {width: measure(options, width) for width in options.width}
    if dist.get_rank() == 0:
        print(f"full state dict of {options.params} tensors, {options.ranks} ranks: ms")
        print(format_times("width", results))
        write_json(options.json, "load", {"ms": results, **vars(options)})
    dist.destroy_process_group()


def measure(options: argparse.Namespace, width: int) -> dict[str, Times]:
    """Returns milliseconds of one load by implementation.

    Weights are (width, width), biases (width,).
    """
    torch.manual_seed(1)
    source = make_model(options.params, width).state_dict()
    model = make_model(options.params, width)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    rank = dist.get_rank()
    full_state: dict[str, Any] = source if rank == 0 else {}
    state_options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def clear_weights() -> None:
        for param in model.parameters():
            param._local_tensor.zero_()

    def check_weights() -> None:
        for name, param in model.named_parameters():
            chunks = source[name].chunk(options.ranks)  # fewer if the last ranks have no rows
            expected = chunks[rank] if rank < len(chunks) else source[name][:0]
            assert torch.equal(param._local_tensor, expected)

    def load_with_torch() -> None:
        set_model_state_dict(model, dict(full_state), options=state_options)

    def load_with_fsdp_c() -> None:
        load_full_state_dict(model, full_state, progress=False)

    calls = {"torch": load_with_torch, "fsdp_c": load_with_fsdp_c}
    for call in calls.values():
        clear_weights()
        call()
        check_weights()
    return measure_in_turns(calls, options.rounds, clear_weights)


if __name__ == "__main__":
    main()
