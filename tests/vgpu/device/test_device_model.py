"""The device against a simple model: random sequences of memory calls, also from
several threads. After every step the bytes in use are those the model says, and
at the end none is lost."""

from __future__ import annotations

import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vgpu.device.ctypes_cuda import INVALID_VALUE, MIB, OK, OUT_OF_MEMORY, Cuda

G = 2 * MIB
MEMORY = 32 * G

relaxed = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)


@pytest.mark.vgpu(memory=MEMORY)
def test_malloc_and_free_agree_with_a_model() -> None:
    gpu = Cuda()
    gpu.call("cudaFree", None)

    @relaxed
    @given(
        st.lists(
            st.tuples(st.booleans(), st.integers(1, 40 * G), st.integers(0, 99)),
            max_size=60,
        )
    )
    def run(steps: list[tuple[bool, int, int]]) -> None:
        live: list[tuple[int, int]] = []
        used = 0
        for allocate, size, pick in steps:
            if allocate:
                size = max(size, G)  # smaller ones share blocks: see the next test
                rounded = -(-size // G) * G
                error, address = gpu.malloc(size)
                if used + rounded <= MEMORY:
                    assert error == OK
                    assert all(
                        address + rounded <= a or a + s <= address for a, s in live
                    )
                    live.append((address, rounded))
                    used += rounded
                else:
                    assert (error, address) == (OUT_OF_MEMORY, 0)
                    assert gpu.call("cudaGetLastError") == OUT_OF_MEMORY
            elif live:
                address, rounded = live.pop(pick % len(live))
                assert gpu.free(address) == OK
                assert gpu.free(address) == INVALID_VALUE
                used -= rounded
            assert gpu.used() == used
        for address, _ in live:
            assert gpu.free(address) == OK
        assert gpu.used() == 0

    run()


@pytest.mark.vgpu(memory=MEMORY)
def test_small_blocks_share_a_block_and_give_it_back() -> None:
    gpu = Cuda()
    gpu.call("cudaFree", None)

    @relaxed
    @given(
        st.lists(
            st.tuples(st.booleans(), st.integers(1, MIB), st.integers(0, 99)),
            max_size=80,
        )
    )
    def run(steps: list[tuple[bool, int, int]]) -> None:
        live: list[tuple[int, int, bytes]] = []
        for allocate, size, pick in steps:
            if allocate:
                error, address = gpu.malloc(size)
                assert error == OK and address % 512 == 0
                assert all(address + size <= a or a + s <= address for a, s, _ in live)
                mark = bytes([1 + pick]) * min(size, 64)
                assert gpu.write(address, mark) == OK
                live.append((address, size, mark))
            elif live:
                address, size, mark = live.pop(pick % len(live))
                assert gpu.read(address, len(mark)) == (OK, mark)
                assert gpu.free(address) == OK
            requested = sum(s for _, s, _ in live)
            blocks, rest = divmod(gpu.used(), G)
            assert rest == 0 and blocks * G >= requested
            assert (blocks == 0) == (not live)
        for address, _, mark in live:
            assert gpu.read(address, len(mark)) == (OK, mark)
            assert gpu.free(address) == OK
        assert gpu.used() == 0

    run()


def virtual_memory(gpu: Cuda, steps: list[tuple[str, int, int, int]]) -> None:
    """Contents live in the handle: writing through one mapping is read by all."""
    slots = 16
    error, base = gpu.reserve(slots * G)
    assert error == OK
    handles: dict[int, int] = {}  # handle: granules
    held: dict[int, int] = {}  # handle: references of the program
    mapped: dict[int, tuple[int, int, int]] = {}  # slot: (granules, handle, offset)
    contents: dict[tuple[int, int], bytes] = {}

    def expected() -> int:
        alive = {h for h, n in held.items() if n} | {h for _, h, _ in mapped.values()}
        return sum(handles[h] for h in alive) * G

    def covering(slot: int) -> int | None:
        return next((s for s, m in mapped.items() if s <= slot < s + m[0]), None)

    for what, a, b, c in steps:
        known = sorted(h for h, n in held.items() if n)
        if what == "create":
            granules = 1 + a % 6
            fits = expected() + granules * G <= MEMORY
            error, handle = gpu.create(granules * G)
            assert error == (OK if fits else OUT_OF_MEMORY)
            if fits:
                handles[handle], held[handle] = granules, 1
        elif what == "release" and known:
            handle = known[a % len(known)]
            assert gpu.release(handle) == OK
            held[handle] -= 1
        elif what == "map" and known:
            handle, slot = known[a % len(known)], b % slots
            offset = c % handles[handle]
            granules = handles[handle] - offset
            free = slot + granules <= slots and all(
                covering(s) is None for s in range(slot, slot + granules)
            )
            where, size = base + slot * G, granules * G
            error = gpu.map(where, size, handle, offset * G)
            assert error == (OK if free else INVALID_VALUE)
            if free:
                mapped[slot] = (granules, handle, offset)
                assert gpu.allow(where, size) == OK
        elif what == "unmap" and mapped:
            slot = sorted(mapped)[a % len(mapped)]
            granules, _, _ = mapped.pop(slot)
            assert gpu.unmap(base + slot * G, granules * G) == OK
            assert gpu.unmap(base + slot * G, granules * G) == INVALID_VALUE
        elif what == "retain" and mapped:
            slot = sorted(mapped)[a % len(mapped)]
            handle = mapped[slot][1]
            assert gpu.retain(base + slot * G) == (OK, handle)
            held[handle] += 1
        elif what == "write" and mapped:
            slot = sorted(mapped)[a % len(mapped)]
            granules, handle, offset = mapped[slot]
            at = b % granules
            data = bytes([1 + c % 255]) * 16
            assert gpu.write(base + (slot + at) * G, data) == OK
            contents[handle, offset + at] = data
        elif what == "read" and mapped:
            slot = sorted(mapped)[a % len(mapped)]
            granules, handle, offset = mapped[slot]
            at = b % granules
            want = contents.get((handle, offset + at), bytes(16))
            assert gpu.read(base + (slot + at) * G, 16) == (OK, want)
        assert gpu.used() == expected()
    for slot, (granules, _, _) in mapped.items():
        assert gpu.unmap(base + slot * G, granules * G) == OK
    for handle, n in held.items():
        for _ in range(n):
            assert gpu.release(handle) == OK
        assert gpu.release(handle) == INVALID_VALUE
    assert gpu.unreserve(base, slots * G) == OK


VIRTUAL_STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["create", "release", "map", "unmap", "retain", "write", "read"]
        ),
        st.integers(0, 99),
        st.integers(0, 99),
        st.integers(0, 999),
    ),
    max_size=60,
)


@pytest.mark.vgpu(memory=MEMORY)
def test_virtual_memory_agrees_with_a_model() -> None:
    gpu = Cuda()
    gpu.call("cudaFree", None)

    @relaxed
    @given(VIRTUAL_STEPS)
    def run(steps: list[tuple[str, int, int, int]]) -> None:
        virtual_memory(gpu, steps)
        assert gpu.used() == 0

    run()


@pytest.mark.vgpu(memory=64 * MEMORY)
def test_threads_lose_no_byte() -> None:
    gpu = Cuda()
    gpu.call("cudaFree", None)
    failures: list[BaseException] = []

    def worker(seed: int) -> None:
        import random

        rng = random.Random(seed)
        live: list[tuple[int, int, bytes]] = []
        try:
            for _ in range(1500):
                if live and rng.random() < 0.5:
                    address, size, mark = live.pop(rng.randrange(len(live)))
                    assert gpu.read(address, 8) == (OK, mark)
                    if size:
                        assert gpu.unmap(address, size) == OK
                        assert gpu.unreserve(address, size) == OK
                    else:
                        assert gpu.free(address) == OK
                    continue
                mark = rng.randbytes(8)
                if rng.random() < 0.5:
                    error, address = gpu.malloc(rng.randrange(1, 4 * G))
                    size = 0
                else:
                    size = rng.randrange(1, 4) * G
                    error, address = gpu.reserve(size)
                    assert error == OK
                    error, handle = gpu.create(size)
                    assert error == OK
                    assert gpu.map(address, size, handle) == OK
                    assert gpu.release(handle) == OK
                    assert gpu.allow(address, size) == OK
                assert error == OK
                assert gpu.write(address, mark) == OK
                live.append((address, size, mark))
            for address, size, mark in live:
                assert gpu.read(address, 8) == (OK, mark)
                if size:
                    assert gpu.unmap(address, size) == OK
                    assert gpu.unreserve(address, size) == OK
                else:
                    assert gpu.free(address) == OK
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures
    assert gpu.used() == 0


@pytest.mark.vgpu(memory=MEMORY)
def test_failed_creates_injected_at_random_lose_no_byte() -> None:
    from vgpu import control

    gpu = Cuda()
    gpu.call("cudaFree", None)

    @relaxed
    @given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=30))
    def run(steps: list[tuple[int, bool]]) -> None:
        live = []
        for granules, fail in steps:
            if fail:
                rule = control.inject("cuMemCreate")
                assert gpu.create(granules * G)[0] == OUT_OF_MEMORY
                assert rule.fired == 1
                continue
            error, handle = gpu.create(granules * G)
            fits = sum(n for n, _ in live) + granules <= MEMORY // G
            assert error == (OK if fits else OUT_OF_MEMORY)
            if fits:
                live.append((granules, handle))
            assert gpu.used() == sum(n for n, _ in live) * G
        for _, handle in live:
            assert gpu.release(handle) == OK
        assert gpu.used() == 0

    run()
