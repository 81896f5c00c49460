// The device addresses of this process: a range that no one can touch.
#pragma once

#include <pthread.h>

#include "state/ranges.h"

#define ADDRESS_BYTES (1ull << 45)

extern pthread_mutex_t memory_lock;  // addresses, and the memory behind them

void* map_host(uint64_t bytes, int protection, bool shared);  // NULL: no room
bool addresses_init(void);
bool is_device_address(uint64_t address);
uint64_t address_take(uint64_t size, uint64_t alignment);  // 0: none
void address_give(uint64_t start, uint64_t size);
