// Counting calls.
#pragma once

#include <cuda.h>
#include <stdint.h>

void call_made(const char* name);  // an implemented one; the name stays where it is
uint64_t calls_made(const char* pattern);
CUresult not_implemented(const char* name);  // counts it; NOT_SUPPORTED
int call_error(const char* name);            // NOT_SUPPORTED in its library
void call_count(uint32_t* counter);
int late_index(const char* name);  // of a call that no library named; -1: no room
int late_stub(int index);
