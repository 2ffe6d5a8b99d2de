"""Random numbers on the simulated CUDA device, and an operator that it does not execute.

``python executed_operators.py SEED`` executes operators in the order of SEED. Prints a JSON object:
random numbers, two of them with the same seed, and the findings of the device.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import stub_runtime


def main(order_seed: int) -> dict[str, Any]:
    device = stub_runtime.start()
    import torch

    device.execute(order_seed)
    torch.manual_seed(3)
    numbers = [torch.randn(4, device="cuda")]
    torch.rand(order_seed + 1)  # the host's generator is a different one
    numbers += [torch.rand(4, device="cuda"), torch.randperm(9, device="cuda")]
    generator = torch.Generator(device="cuda").manual_seed(5)
    numbers.append(torch.rand(4, device="cuda", generator=generator))
    torch.manual_seed(3)
    again = torch.randn(4, device="cuda")
    lists = [tensor.tolist() for tensor in (*numbers, again)]
    before = device.findings()
    torch.equal(numbers[0], again)
    return {
        "numbers": lists[:-1],
        "again": lists[-1],
        "findings": [before, device.findings()],
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(int(sys.argv[1]))), flush=True)
    os._exit(0)
