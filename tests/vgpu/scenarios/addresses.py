"""Two threads, each with its own device, call the sleep-mode allocator as PyTorch does.
PyTorch has one mutex per device, so both can be in the allocator at once."""

from __future__ import annotations

import ctypes
import threading

from bench.scenarios.result import print_result

SIZE = 2 << 20


def main() -> None:
    import torch
    from vllm.device_allocator import cumem

    for device in (0, 1):
        torch.zeros(1, device=f"cuda:{device}")
    allocator = cumem.CuMemAllocator.get_instance()
    library = ctypes.CDLL(cumem.lib_name)
    library.my_malloc.restype = ctypes.c_void_p
    library.my_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.my_free.restype = None
    library.my_free.argtypes = [ctypes.c_void_p, *library.my_malloc.argtypes]
    alive: list[set[int]] = [set(), set()]

    def work(device: int) -> None:
        torch.cuda.set_device(device)
        mine: list[int] = []
        for _ in range(20_000):
            mine.append(library.my_malloc(SIZE, device, None))
            if len(mine) > 4:
                library.my_free(mine.pop(0), SIZE, device, None)
        alive[device] = set(mine)

    threads = [threading.Thread(target=work, args=(device,)) for device in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = alive[0] | alive[1]
    recorded = known & set(allocator.pointer_to_data)
    extra = len(allocator.pointer_to_data) - len(recorded)
    result = {"alive": len(known), "recorded": len(recorded) + extra}
    print_result(result)


if __name__ == "__main__":
    main()
