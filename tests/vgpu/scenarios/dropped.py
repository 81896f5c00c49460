"""Pinned host memory of device 1, dropped by a thread whose current device is 0."""

from __future__ import annotations

import threading

from bench.scenarios.result import print_result


def main() -> None:
    import torch
    from vllm.device_allocator.host_memory import (
        empty_host_tensor,
        release_unused_host_memory,
    )

    from vgpu import control

    torch.cuda.set_device(1)
    torch.zeros(1, device="cuda")
    held = [empty_host_tensor(4096)]
    pinned = [control.pinned()]

    def drop() -> None:
        held.clear()
        release_unused_host_memory()

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    pinned.append(control.pinned())
    contexts = [control.process_used(device) for device in (0, 1)]
    print_result({"contexts": contexts, "pinned": pinned})


if __name__ == "__main__":
    main()
